// The list scheduler's pass over one iteration, and the timing of a given order.
//
// Operations and what they wait for come as arrays (megatron_flex/schedule/operations.py). An
// operation is one number, (kind * stages + stage) * batches + micro-batch; kinds are forward,
// backward (or its input half) and weight half. tests/oracles has the same rules in Python; the
// tests ask for the same bits.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "api.h"
#include "large.h"
#include "links.h"

// Mirrored by megatron_flex/schedule/engine.py; all fields are eight bytes.
struct mflex_schedule_problem {
  int64_t kinds, stages, batches, devices;
  int64_t train;                // 0: forwards only
  int64_t forwards_first;       // a device begins its backwards after its last forward
  int64_t alternate;            // after a backward, a device looks at its forwards first
  int64_t lender;               // who admits forwards to memory: 0 nobody, 1 banker, 2 ticket
  double tolerance;             // events that are closer happen at the same time
  double stop;                  // give up when the makespan is sure to reach this
  const int64_t* device;        // [operations], where each runs
  const double* seconds;        // [operations]
  const double* takes;          // [operations], bytes taken when it begins
  const double* frees;          // [operations], bytes given back when it ends; only one of the two
  const int64_t* needs;         // [operations], how many others it waits for
  const int64_t* offset;        // [operations + 1], into target and wire
  const int64_t* target;        // [edges], operations that wait for it
  const double* wire;           // [edges], seconds on the link
  const int64_t* lead;          // [batches], the first of each one's chain
  const int64_t* turn;          // [batches], micro-batches in the order of entry
  const double* cap;            // [stages], forwards in flight on a replica
  const double* memory;         // [devices], bytes
  const int64_t* queue_offset;  // [devices + 1], into queue
  const int64_t* queue;         // kind * stages + stage, most urgent first
  const int64_t* order_offset;  // [devices + 1], into order
  int64_t* order;               // operations of each device in turn; out (replay: in)
  double* start;                // [operations], out
  double* finish;               // [operations], out
  double* peak;                 // [devices], out
  int64_t* sequence;            // [operations], their positions in the order in which they were
                                // started, out (replay: the operations in the order of running)
  int64_t* reached;             // [devices], operations that a replay has run, out
};

namespace mflex {
namespace {

constexpr int64_t kForward = 0, kBackward = 1;
constexpr double kSlack = 1 + 1e-12;
enum Verdict : int64_t { kPlaced = 0, kGaveUp = 1, kStuck = 2 };

// When a message crosses a link; `free`: when the last one has.
double cross(double& free, double now, double wire) {
  return free = std::max(now, free) + wire;
}

// Division of 32-bit numbers by one and the same, as a multiplication (Lemire, Kaser and Kurz,
// "Faster remainder by direct computation", 2019).
class Divider {
 public:
  explicit Divider(int64_t divisor) : magic_(divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0) {}

  int64_t operator()(int64_t number) const {
    if (!magic_) return number;
    return static_cast<int64_t>(static_cast<unsigned __int128>(magic_) * number >> 64);
  }

 private:
  uint64_t magic_;
};

class Lender {
 public:
  virtual ~Lender() = default;
  // `size`: bytes that the forward takes.
  virtual bool admits(int64_t device, int64_t stage, int64_t batch, double size,
                      double used) const = 0;
  virtual void admit(int64_t device, int64_t stage, int64_t batch) = 0;
};

// What a device may lend without stopping the pipeline later: tests/oracles/lenders.py has the why.
// The first slice of a chain takes all that the chain will need.
class Banker : public Lender {
 public:
  explicit Banker(const mflex_schedule_problem& p) : p_(p), way_(p.devices) {
    bool again = false;  // does a micro-batch come to a device more than once?
    for (int64_t d = 0; d < p.devices; ++d) {
      memory_.push_back(p.memory[d] * kSlack);
      spare_.push_back(memory_.back());
      again |= p.queue_offset[d + 1] - p.queue_offset[d] > p.kinds;
    }
    if (!again) return;
    need_.resize(p.stages * p.batches);
    // Some micro-batches at a time: their numbers are neighbours, those of one are far apart.
    constexpr int64_t kTogether = 8;
    std::vector<double> after(kTogether * p.devices);
    for (int64_t first = 0; first < p.batches; first += kTogether) {
      const int64_t last = std::min(first + kTogether, p.batches);
      std::fill(after.begin(), after.end(), 0.0);
      for (int64_t s = p.stages - 1; s >= 0; --s) {
        for (int64_t m = first; m < last; ++m) {
          const int64_t at = s * p.batches + m;
          double& own = after[(m - first) * p.devices + p.device[at]];
          need_[at] = {p.takes[at], own};
          own += p.takes[at];
        }
      }
    }
  }

  bool admits(int64_t device, int64_t stage, int64_t batch, double size,
              double used) const override {
    if (used + size > memory_[device]) return false;
    if (need_.empty()) return true;
    const double later = need_[stage * p_.batches + batch].later;
    if (later == 0.0) return true;
    double largest = 0.0;
    for (const Way& way : way_[device]) largest = std::max(largest, way.need);
    return spare_[device] - size >= std::max(largest, later);
  }

  void admit(int64_t device, int64_t stage, int64_t batch) override {
    if (need_.empty()) return;
    const auto [size, later] = need_[stage * p_.batches + batch];
    auto& ways = way_[device];
    auto way =
        std::find_if(ways.begin(), ways.end(), [batch](const Way& w) { return w.batch == batch; });
    if (later != 0.0) {
      if (way == ways.end()) way = ways.insert(way, Way{batch, 0.0, 0.0});
      way->held = way->held + size;
      way->need = later;
      spare_[device] -= size;
    } else if (way != ways.end()) {
      spare_[device] += way->held;
      ways.erase(way);
    }
  }

 private:
  // A micro-batch with forwards still to come on a device: bytes that it holds and needs there.
  struct Way {
    int64_t batch;
    double held, need;
  };
  // What a forward takes, and what later ones of its micro-batch take on its device.
  struct Need {
    double size, later;
  };
  const mflex_schedule_problem& p_;
  std::vector<double> memory_, spare_;
  LargeVector<Need> need_;  // empty: nothing is needed later
  std::vector<std::vector<Way>> way_;
};

class Ticket : public Lender {
 public:
  explicit Ticket(const mflex_schedule_problem& p)
      : p_(p), under_way_(p.devices), room_(p.devices), held_(p.batches), complete_(p.batches) {
    for (int64_t d = 0; d < p.devices; ++d) memory_.push_back(p.memory[d] * kSlack);
    std::vector<double> whole(p.devices);
    for (int64_t i = 0; i < p.batches; ++i) {
      if (p.lead[p.turn[i]] == p.turn[i]) turn_.push_back(p.turn[i]);
    }
    for (const int64_t m : turn_) {
      for (int64_t s = 0; s < p.stages; ++s) whole[p.device[s * p.batches + m]] = 0.0;
      for (int64_t s = 0; s < p.stages; ++s) {
        const int64_t at = s * p.batches + m;
        whole[p.device[at]] = whole[p.device[at]] + p.takes[at];
      }
      for (int64_t s = 0; s < p.stages; ++s) {
        const int64_t device = p.device[s * p.batches + m];
        room_[device] = std::max(room_[device], whole[device]);
      }
    }
  }

  bool admits(int64_t device, int64_t stage, int64_t batch, double size,
              double used) const override {
    if (used + size > memory_[device]) return false;
    const int64_t holder = turn_[first_];
    if (batch == holder || stage == p_.stages - 1) return true;
    const double others = under_way_[device] - held_at(holder, device);
    return others + size <= memory_[device] - room_[device];
  }

  void admit(int64_t device, int64_t stage, int64_t batch) override {
    auto& held = held_[batch];
    if (stage < p_.stages - 1) {
      const double size = p_.takes[stage * p_.batches + batch];
      auto found = std::find_if(held.begin(), held.end(),
                                [device](const auto& part) { return part.first == device; });
      if (found == held.end()) found = held.insert(found, {device, 0.0});
      found->second += size;
      under_way_[device] += size;
      return;
    }
    for (const auto& [at, size] : held) under_way_[at] -= size;
    held.clear();
    complete_[batch] = 1;
    while (first_ + 1 < turn_.size() && complete_[turn_[first_]]) ++first_;
  }

 private:
  double held_at(int64_t batch, int64_t device) const {
    for (const auto& [at, size] : held_[batch]) {
      if (at == device) return size;
    }
    return 0.0;
  }

  const mflex_schedule_problem& p_;
  size_t first_ = 0;
  std::vector<int64_t> turn_;  // in the order of entry, a chain as one
  std::vector<double> memory_, under_way_, room_;
  std::vector<std::vector<std::pair<int64_t, double>>> held_;
  std::vector<char> complete_;
};

// What comes next in time, then by number: a heap of four children, whose keys compare as one
// integer. Four lie in a cache line, and most of the time of a pass of thousands of devices goes
// into looking for lines.
class Events {
 public:
  bool empty() const { return keys_.empty(); }
  double time() const { return time_of(keys_.front()); }
  int64_t number() const { return number_of(keys_.front()); }

  void push(double time, int64_t number) {
    const Key key = key_of(time, number);
    size_t hole = keys_.size();
    keys_.push_back(key);
    while (hole > 0) {
      const size_t parent = (hole - 1) / 4;
      if (keys_[parent] < key) break;
      keys_[hole] = keys_[parent];
      hole = parent;
    }
    keys_[hole] = key;
  }

  std::pair<double, int64_t> pop() {
    const Key first = keys_.front(), last = keys_.back();
    keys_.pop_back();
    const size_t count = keys_.size();
    size_t hole = 0;
    for (;;) {
      const size_t child = 4 * hole + 1;
      if (child >= count) break;
      size_t best = child;
      for (size_t other = child + 1; other < std::min(child + 4, count); ++other) {
        best = keys_[other] < keys_[best] ? other : best;
      }
      if (last < keys_[best]) break;
      keys_[hole] = keys_[best];
      hole = best;
    }
    if (count) keys_[hole] = last;
    return {time_of(first), number_of(first)};
  }

 private:
  using Key = unsigned __int128;
  static constexpr uint64_t kSign = uint64_t{1} << 63;

  // As integers, bits of doubles are in their order, if the negative ones are turned round.
  static Key key_of(double time, int64_t number) {
    uint64_t bits;
    const double plain = time + 0.0;  // there is one zero
    std::memcpy(&bits, &plain, sizeof bits);
    bits ^= bits & kSign ? ~uint64_t{0} : kSign;
    return Key{bits} << 64 | (static_cast<uint64_t>(number) ^ kSign);
  }
  static int64_t number_of(Key key) {
    return static_cast<int64_t>(static_cast<uint64_t>(key) ^ kSign);
  }
  static double time_of(Key key) {
    uint64_t bits = static_cast<uint64_t>(key >> 64);
    bits ^= bits & kSign ? kSign : ~uint64_t{0};
    double time;
    std::memcpy(&time, &bits, sizeof time);
    return time;
  }

  std::vector<Key> keys_;
};

class Pass {
 public:
  Pass(const mflex_schedule_problem& p, Lender* lender)
      : p_(p),
        by_batches_(p.batches),
        lender_(lender),
        rank_(p.batches),
        devices_(p.devices),
        queues_(p.queue_offset[p.devices]),
        ops_(kept_ops()),
        edges_(kept_edges()),
        in_flight_(p.devices * p.stages),
        links_(p.devices) {
    for (int64_t i = 0; i < p.batches; ++i) rank_[p.turn[i]] = static_cast<int32_t>(i);
    std::vector<int32_t> slot(p.devices * p.kinds * p.stages, -1);
    for (int64_t d = 0; d < p.devices; ++d) {
      devices_[d].placed = p.order_offset[d];
      p.peak[d] = 0.0;
      for (int64_t i = p.queue_offset[d]; i < p.queue_offset[d + 1]; ++i) {
        slot[d * p.kinds * p.stages + p.queue[i]] = static_cast<int32_t>(i);
        queues_[i].number = p.queue[i];
        queues_[i].stage = p.queue[i] % p.stages;
      }
    }
    line_up(slot);
    for (int64_t code = 0; code < total(); ++code) {
      devices_[p.device[code]].work_left += p.seconds[code];
    }
  }

  Verdict run(double stop, bool force) {
    for (int64_t code = 0; code < total(); ++code) {
      if (!p_.needs[code]) ready(place_of(code));
    }
    double now = 0.0;
    for (;;) {
      // By device, whatever touched them first.
      if (touched_.size() > 1) std::sort(touched_.begin(), touched_.end());
      for (const int32_t d : touched_) {
        devices_[d].touched = false;
        if (!devices_[d].idle) continue;
        if (now + devices_[d].work_left >= stop) return kGaveUp;
        dispatch(d, now);
      }
      touched_.clear();
      if (events_.empty()) {
        if (started_ == total()) return placed();
        if (!force || !start_anyway(now)) return kStuck;
        continue;
      }
      const double horizon = events_.time() + p_.tolerance;
      while (!events_.empty() && events_.time() <= horizon) {
        const auto [time, code] = events_.pop();
        now = time;
        if (!events_.empty()) look_ahead(events_.number());
        if (code < 0) {
          arrive(place_of(-1 - code));
        } else {
          ended(code, now);
        }
      }
    }
  }

 private:
  using Heap = std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>>;

  // A large problem is in no cache. So what is asked again and again of an operation or a device is
  // together, and operations of micro-batches that enter one after the other are neighbours: the
  // place of one is its code with the micro-batch's rank in its stead.
  struct Operation {
    double seconds;
    double grows;  // bytes that it takes when it begins; less than 0: frees when it ends
    int32_t device;
    int32_t slot;  // of its queue
    int32_t first_edge;
    int16_t edges, needs;
  };
  struct Edge {
    double wire;
    int32_t target, place;
  };
  struct Device {
    double used = 0.0, work_left = 0.0;
    int64_t placed = 0, forwards_left = 0;
    bool idle = true, after_backward = false, touched = false;
  };
  // Operations of one kind and stage on a device that may begin, by rank.
  struct Queue {
    int64_t number, stage;
    Heap waiting;   // what must be admitted, if it is a forward
    Heap admitted;  // slices of chains that were
  };

  static LargeVector<Operation>& kept_ops() {
    static thread_local LargeVector<Operation> ops;
    return ops;
  }
  static LargeVector<Edge>& kept_edges() {
    static thread_local LargeVector<Edge> edges;
    return edges;
  }

  int64_t total() const { return p_.kinds * p_.stages * p_.batches; }

  // Fill in operations and edges by place.
  void line_up(const std::vector<int32_t>& slot) {
    ops_.resize(total());
    edges_.clear();
    edges_.reserve(p_.offset[total()]);
    const int64_t queues = p_.kinds * p_.stages;
    int64_t place = 0;
    for (int64_t queue = 0; queue < queues; ++queue) {
      for (int64_t rank = 0; rank < p_.batches; ++rank, ++place) {
        const int64_t batch = p_.turn[rank], code = queue * p_.batches + batch;
        const int64_t device = p_.device[code];
        ops_[place] = {p_.seconds[code],
                       p_.takes[code] - p_.frees[code],
                       static_cast<int32_t>(device),
                       slot[device * queues + queue],
                       static_cast<int32_t>(edges_.size()),
                       static_cast<int16_t>(p_.offset[code + 1] - p_.offset[code]),
                       static_cast<int16_t>(p_.needs[code])};
        for (int64_t e = p_.offset[code]; e < p_.offset[code + 1]; ++e) {
          edges_.push_back({p_.wire[e], static_cast<int32_t>(p_.target[e]),
                            static_cast<int32_t>(place_of(p_.target[e]))});
        }
        devices_[device].forwards_left += queue < p_.stages;
      }
    }
  }

  Verdict placed() {
    for (int64_t code = 0; code < total(); ++code) {
      p_.finish[code] = p_.start[code] + p_.seconds[code];
    }
    return kPlaced;
  }

  // Queue and micro-batch of a code, or queue and rank of a place.
  std::pair<int64_t, int64_t> split(int64_t code) const {
    const int64_t queue = by_batches_(code);
    return {queue, code - queue * p_.batches};
  }
  int64_t place_of(int64_t code) const {
    const auto [queue, batch] = split(code);
    return queue * p_.batches + rank_[batch];
  }

  void look_ahead(int64_t number) const {
    __builtin_prefetch(&ops_[place_of(number < 0 ? -1 - number : number)], 1);
  }

  void touch(int64_t device) {
    if (devices_[device].touched) return;
    devices_[device].touched = true;
    touched_.push_back(static_cast<int32_t>(device));
  }

  void ended(int64_t code, double now) {
    const auto [queue, batch] = split(code);
    const Operation& op = ops_[queue * p_.batches + rank_[batch]];
    const int64_t device = op.device;
    touch(device);
    devices_[device].idle = true;
    const int64_t stage = queue - kBackward * p_.stages;
    if (0 <= stage && stage < p_.stages && p_.lead[batch] == batch) {
      --in_flight_[device * p_.stages + stage];
    }
    if (op.grows < 0.0) devices_[device].used += op.grows;
    const Edge* edge = edges_.data() + op.first_edge;
    for (const Edge* end = edge + op.edges; edge != end; ++edge) {
      const int64_t to = ops_[edge->place].device;
      if (to != device) {
        const double arrival = cross(links_.at(device, to), now, edge->wire);
        if (arrival > now) {
          events_.push(arrival, -1 - static_cast<int64_t>(edge->target));
          continue;
        }
      }
      arrive(edge->place);
    }
  }

  void arrive(int64_t place) {
    if (!--ops_[place].needs) ready(place);
  }

  void ready(int64_t place) {
    const auto [queue, rank] = split(place);
    const int64_t batch = p_.turn[rank];
    const bool admitted = queue < p_.stages && p_.lead[batch] != batch;
    const Operation& op = ops_[place];
    __builtin_prefetch(edges_.data() + op.first_edge);
    Queue& to = queues_[op.slot];
    (admitted ? to.admitted : to.waiting).push(static_cast<int32_t>(rank));
    touch(op.device);
  }

  void dispatch(int64_t device, double now) {
    const bool hold = p_.forwards_first && p_.train && devices_[device].forwards_left > 0;
    bool starved = false;
    const auto first = queues_.begin() + p_.queue_offset[device];
    const auto last = queues_.begin() + p_.queue_offset[device + 1];
    if (p_.alternate && devices_[device].after_backward) {
      for (auto queue = first; queue != last; ++queue) {
        if (queue->number < p_.stages && take(device, &*queue, hold, now, &starved)) return;
      }
    }
    for (auto queue = first; queue != last; ++queue) {
      if (take(device, &*queue, hold, now, &starved)) return;
    }
  }

  // Whether an operation of the queue could be started.
  bool take(int64_t device, Queue* queue, bool hold, double now, bool* starved) {
    if (!queue->admitted.empty()) {
      const int64_t rank = queue->admitted.top();
      queue->admitted.pop();
      begin(device, queue->number, rank, now);
      return true;
    }
    if (queue->waiting.empty()) return false;
    const int64_t rank = queue->waiting.top();
    if (queue->number < p_.stages) {
      const int64_t stage = queue->stage;
      // Nothing less urgent may take the memory that a forward waits for.
      if (*starved || (p_.train && in_flight_[device * p_.stages + stage] >= p_.cap[stage])) {
        return false;
      }
      const double size = std::max(0.0, ops_[queue->number * p_.batches + rank].grows);
      const double used = devices_[device].used;
      if (lender_ && !lender_->admits(device, stage, p_.turn[rank], size, used)) {
        *starved = true;
        return false;
      }
    } else if (hold) {
      return false;
    }
    queue->waiting.pop();
    begin(device, queue->number, rank, now);
    return true;
  }

  void begin(int64_t device, int64_t queue, int64_t rank, double now) {
    const int64_t batch = p_.turn[rank], code = queue * p_.batches + batch;
    const Operation& op = ops_[queue * p_.batches + rank];
    Device& at = devices_[device];
    p_.start[code] = now;
    p_.order[at.placed++] = code;
    p_.sequence[code] = started_++;
    at.idle = false;
    at.after_backward = queue >= p_.stages;
    at.work_left -= op.seconds;
    // What its end will touch.
    const Edge* edge = edges_.data() + op.first_edge;
    for (const Edge* end = edge + op.edges; edge != end; ++edge) {
      __builtin_prefetch(&ops_[edge->place], 1);
    }
    if (op.grows > 0.0) at.used += op.grows;
    p_.peak[device] = std::max(p_.peak[device], at.used);
    if (queue < p_.stages && p_.train) {
      --at.forwards_left;
      if (p_.lead[batch] == batch) {
        ++in_flight_[device * p_.stages + queue];
        if (lender_) lender_->admit(device, queue, batch);
      }
    }
    events_.push(now + op.seconds, code);
  }

  // A device is too small for one micro-batch: start the first one, whatever it takes.
  bool start_anyway(double now) {
    Queue* best = nullptr;
    int64_t best_rank = 0, best_device = 0;
    for (int64_t d = 0; d < p_.devices; ++d) {
      for (int64_t i = p_.queue_offset[d]; i < p_.queue_offset[d + 1]; ++i) {
        Queue& queue = queues_[i];
        if (queue.number >= p_.stages || queue.waiting.empty()) continue;
        const int64_t first = queue.waiting.top();
        if (!best || first < best_rank || (first == best_rank && queue.stage > best->stage)) {
          best = &queue, best_rank = first, best_device = d;
        }
      }
    }
    if (!best) return false;
    best->waiting.pop();
    begin(best_device, best->number, best_rank, now);
    return true;
  }

  const mflex_schedule_problem& p_;
  const Divider by_batches_;
  Lender* lender_;
  std::vector<int32_t> rank_;
  std::vector<Device> devices_;
  std::vector<Queue> queues_;  // of each device in turn, most urgent first
  // Kept from pass to pass of a thread: to get them anew takes as long as to fill them.
  LargeVector<Operation>& ops_;  // by place
  LargeVector<Edge>& edges_;
  std::vector<int32_t> in_flight_;
  std::vector<int32_t> touched_;
  Links<double> links_;
  Events events_;
  int64_t started_ = 0;
};

// The number of operations of the given order that could be run.
int64_t replay(const mflex_schedule_problem& p) {
  const int64_t total = p.kinds * p.stages * p.batches;
  std::vector<int64_t> needs(p.needs, p.needs + total);
  std::vector<double> arrived(total), free(p.devices), used(p.devices);
  std::vector<char> queued(p.devices, 1);
  Links<double> links(p.devices);
  std::vector<int64_t> work;
  for (int64_t d = 0; d < p.devices; ++d) {
    p.peak[d] = 0.0;
    p.reached[d] = 0;
    work.push_back(d);
  }
  int64_t done = 0;
  while (!work.empty()) {
    const int64_t device = work.back();
    work.pop_back();
    queued[device] = 0;
    const int64_t first = p.order_offset[device], count = p.order_offset[device + 1] - first;
    int64_t& at = p.reached[device];
    while (at < count && !needs[p.order[first + at]]) {
      const int64_t code = p.order[first + at++];
      p.start[code] = std::max(free[device], arrived[code]);
      const double end = p.finish[code] = free[device] = p.start[code] + p.seconds[code];
      p.sequence[done++] = code;
      used[device] += p.takes[code];
      p.peak[device] = std::max(p.peak[device], used[device]);
      used[device] -= p.frees[code];
      for (int64_t e = p.offset[code]; e < p.offset[code + 1]; ++e) {
        const int64_t target = p.target[e], to = p.device[target];
        double arrival = end;
        if (to != device) {
          arrival = cross(links.at(device, to), end, p.wire[e]);
          if (!queued[to]) {
            queued[to] = 1;
            work.push_back(to);
          }
        }
        arrived[target] = std::max(arrived[target], arrival);
        --needs[target];
      }
    }
  }
  return done;
}

}  // namespace
}  // namespace mflex

// One pass. 0: placed, 1: gave up at `stop`, 2: the banker's rule stopped the pipeline.
MFLEX_API int64_t mflex_schedule_place(const mflex_schedule_problem* problem) {
  using namespace mflex;
  const mflex_schedule_problem& p = *problem;
  if (p.lender == 1) {
    Banker banker(p);
    return Pass(p, &banker).run(p.stop, false);
  }
  if (p.lender == 2) {
    Ticket ticket(p);
    return Pass(p, &ticket).run(p.stop, true);
  }
  return Pass(p, nullptr).run(p.stop, false);
}

// Times `order`; returns the number of operations that it could run.
MFLEX_API int64_t mflex_schedule_replay(const mflex_schedule_problem* problem) {
  return mflex::replay(*problem);
}
