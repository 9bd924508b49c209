// The list scheduler's pass over one iteration, and the timing of a given order.
//
// Operations and what they wait for come as arrays (megatron_flex/schedule/operations.py). An
// operation is one number, (kind * stages + stage) * batches + micro-batch; kinds are forward,
// backward (or its input half) and weight half. tests/oracles has the same rules in Python; the
// tests ask for the same bits.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "api.h"
#include "large.h"

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
  int64_t* sequence;            // operations in the order in which they were started, out
  int64_t* reached;             // [devices], operations that a replay has run, out
};

namespace mflex {
namespace {

constexpr int64_t kForward = 0, kBackward = 1;
constexpr double kSlack = 1 + 1e-12;
enum Verdict : int64_t { kPlaced = 0, kGaveUp = 1, kStuck = 2 };

// When the last message of each link (source, target) has crossed it.
class Links {
 public:
  explicit Links(int64_t devices) : free_(static_cast<size_t>(devices)) {}

  double cross(int64_t source, int64_t target, double now, double wire) {
    auto& links = free_[static_cast<size_t>(source)];
    auto found = std::find_if(links.begin(), links.end(),
                              [target](const auto& link) { return link.first == target; });
    if (found == links.end()) found = links.insert(found, {target, 0.0});
    return found->second = std::max(now, found->second) + wire;
  }

 private:
  std::vector<std::vector<std::pair<int64_t, double>>> free_;
};

class Lender {
 public:
  virtual ~Lender() = default;
  virtual bool admits(int64_t device, int64_t stage, int64_t batch, double used) const = 0;
  virtual void admit(int64_t device, int64_t stage, int64_t batch) = 0;
};

// What a device may lend without stopping the pipeline later: tests/oracles/lenders.py has the why.
// The first slice of a chain takes all that the chain will need.
class Banker : public Lender {
 public:
  explicit Banker(const mflex_schedule_problem& p)
      : p_(p), need_(p.stages * p.batches), way_(p.devices) {
    for (int64_t d = 0; d < p.devices; ++d) {
      memory_.push_back(p.memory[d] * kSlack);
      spare_.push_back(memory_.back());
    }
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

  bool admits(int64_t device, int64_t stage, int64_t batch, double used) const override {
    const auto [size, later] = need_[stage * p_.batches + batch];
    if (used + size > memory_[device]) return false;
    if (later == 0.0) return true;
    double largest = 0.0;
    for (const Way& way : way_[device]) largest = std::max(largest, way.need);
    return spare_[device] - size >= std::max(largest, later);
  }

  void admit(int64_t device, int64_t stage, int64_t batch) override {
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
  LargeVector<Need> need_;
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

  bool admits(int64_t device, int64_t stage, int64_t batch, double used) const override {
    const double size = p_.takes[stage * p_.batches + batch];
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

class Pass {
 public:
  Pass(const mflex_schedule_problem& p, Lender* lender)
      : p_(p),
        lender_(lender),
        rank_(p.batches),
        waiting_(p.queue_offset[p.devices]),
        admitted_(p.queue_offset[p.devices]),
        ops_(kept_ops()),
        edges_(kept_edges()),
        in_flight_(p.devices * p.stages),
        used_(p.devices),
        forwards_left_(p.devices),
        work_left_(p.devices),
        placed_(p.devices),
        idle_(p.devices, 1),
        after_backward_(p.devices),
        is_touched_(p.devices),
        links_(p.devices) {
    for (int64_t i = 0; i < p.batches; ++i) rank_[p.turn[i]] = i;
    std::vector<int32_t> slot(p.devices * p.kinds * p.stages, -1);
    for (int64_t d = 0; d < p.devices; ++d) {
      placed_[d] = p.order_offset[d];
      p.peak[d] = 0.0;
      for (int64_t i = p.queue_offset[d]; i < p.queue_offset[d + 1]; ++i) {
        slot[d * p.kinds * p.stages + p.queue[i]] = static_cast<int32_t>(i);
      }
    }
    ops_.resize(total());
    edges_.clear();
    edges_.reserve(p.offset[total()]);
    for (int64_t place = 0; place < total(); ++place) {
      const auto [queue, rank] = split(place);
      const int64_t code = queue * p.batches + p.turn[rank];
      ops_[place] = {p.seconds[code],
                     p.takes[code] - p.frees[code],
                     static_cast<int32_t>(p.device[code]),
                     slot[p.device[code] * p.kinds * p.stages + queue],
                     static_cast<int32_t>(edges_.size()),
                     static_cast<int16_t>(p.offset[code + 1] - p.offset[code]),
                     static_cast<int16_t>(p.needs[code])};
      for (int64_t e = p.offset[code]; e < p.offset[code + 1]; ++e) {
        edges_.push_back({p.wire[e], static_cast<int32_t>(p.target[e]),
                          static_cast<int32_t>(place_of(p.target[e]))});
      }
      forwards_left_[p.device[code]] += code < p.stages * p.batches;
    }
    for (int64_t code = 0; code < total(); ++code) work_left_[p.device[code]] += p.seconds[code];
  }

  Verdict run(double stop, bool force) {
    for (int64_t code = 0; code < total(); ++code) {
      if (!p_.needs[code]) ready(place_of(code));
    }
    double now = 0.0;
    for (;;) {
      // By device, whatever touched them first.
      std::sort(touched_.begin(), touched_.end());
      for (const int64_t d : touched_) {
        is_touched_[d] = 0;
        if (!idle_[d]) continue;
        if (now + work_left_[d] >= stop) return kGaveUp;
        dispatch(d, now);
      }
      touched_.clear();
      if (events_.empty()) {
        if (started_ == total()) return placed();
        if (!force || !start_anyway(now)) return kStuck;
        continue;
      }
      const double horizon = events_.top().first + p_.tolerance;
      while (!events_.empty() && events_.top().first <= horizon) {
        const auto [time, code] = events_.top();
        events_.pop();
        now = time;
        if (code < 0) {
          arrive(place_of(-1 - code));
        } else {
          ended(code, now);
        }
      }
    }
  }

 private:
  using Event = std::pair<double, int64_t>;  // time; operation, or -1 - operation: an arrival
  using Heap = std::priority_queue<int64_t, std::vector<int64_t>, std::greater<int64_t>>;

  // A large problem is in no cache. So what is asked again and again of an operation is together,
  // and operations of micro-batches that enter one after the other are neighbours: the place of one
  // is its code with the micro-batch's rank in its stead.
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

  static LargeVector<Operation>& kept_ops() {
    static thread_local LargeVector<Operation> ops;
    return ops;
  }
  static LargeVector<Edge>& kept_edges() {
    static thread_local LargeVector<Edge> edges;
    return edges;
  }

  int64_t total() const { return p_.kinds * p_.stages * p_.batches; }

  Verdict placed() {
    for (int64_t code = 0; code < total(); ++code) {
      p_.finish[code] = p_.start[code] + p_.seconds[code];
    }
    return kPlaced;
  }

  // Queue and micro-batch of a code, or queue and rank of a place.
  std::pair<int64_t, int64_t> split(int64_t code) const {
    const auto of = static_cast<uint32_t>(code), batches = static_cast<uint32_t>(p_.batches);
    return {of / batches, of % batches};
  }
  int64_t place_of(int64_t code) const {
    const auto [queue, batch] = split(code);
    return queue * p_.batches + rank_[batch];
  }

  void touch(int64_t device) {
    if (is_touched_[device]) return;
    is_touched_[device] = 1;
    touched_.push_back(device);
  }

  void ended(int64_t code, double now) {
    const auto [queue, batch] = split(code);
    const Operation& op = ops_[queue * p_.batches + rank_[batch]];
    const int64_t device = op.device;
    touch(device);
    idle_[device] = 1;
    const int64_t stage = queue - kBackward * p_.stages;
    if (0 <= stage && stage < p_.stages && p_.lead[batch] == batch) {
      --in_flight_[device * p_.stages + stage];
    }
    if (op.grows < 0.0) used_[device] += op.grows;
    const Edge* edge = edges_.data() + op.first_edge;
    for (const Edge* end = edge + op.edges; edge != end; ++edge) {
      const int64_t to = ops_[edge->place].device;
      if (to != device) {
        const double arrival = links_.cross(device, to, now, edge->wire);
        if (arrival > now) {
          events_.emplace(arrival, -1 - static_cast<int64_t>(edge->target));
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
    (admitted ? admitted_ : waiting_)[op.slot].push(rank);
    touch(op.device);
  }

  void dispatch(int64_t device, double now) {
    const bool hold = p_.forwards_first && p_.train && forwards_left_[device] > 0;
    const bool turn = p_.alternate && after_backward_[device];
    const int64_t first = p_.queue_offset[device], count = p_.queue_offset[device + 1] - first;
    bool starved = false;
    for (int64_t look = turn ? 0 : count; look < 2 * count; ++look) {
      const int64_t i = first + look % count;
      const int64_t queue = p_.queue[i], stage = queue % p_.stages;
      if (look < count && queue >= p_.stages) continue;
      if (!admitted_[i].empty()) {
        const int64_t batch = p_.turn[admitted_[i].top()];
        admitted_[i].pop();
        begin(device, queue, batch, now);
        return;
      }
      if (waiting_[i].empty()) continue;
      const int64_t batch = p_.turn[waiting_[i].top()];
      if (queue < p_.stages) {
        // Nothing less urgent may take the memory that a forward waits for.
        if (starved || (p_.train && in_flight_[device * p_.stages + stage] >= p_.cap[stage])) {
          continue;
        }
        if (lender_ && !lender_->admits(device, stage, batch, used_[device])) {
          starved = true;
          continue;
        }
      } else if (hold) {
        continue;
      }
      waiting_[i].pop();
      begin(device, queue, batch, now);
      return;
    }
  }

  void begin(int64_t device, int64_t queue, int64_t batch, double now) {
    const int64_t code = queue * p_.batches + batch;
    const Operation& op = ops_[queue * p_.batches + rank_[batch]];
    const double seconds = op.seconds;
    p_.start[code] = now;
    p_.order[placed_[device]++] = code;
    p_.sequence[started_++] = code;
    idle_[device] = 0;
    after_backward_[device] = queue >= p_.stages;
    work_left_[device] -= seconds;
    // What its end will touch.
    const Edge* edge = edges_.data() + op.first_edge;
    for (const Edge* end = edge + op.edges; edge != end; ++edge) {
      __builtin_prefetch(&ops_[edge->place], 1);
    }
    if (op.grows > 0.0) used_[device] += op.grows;
    p_.peak[device] = std::max(p_.peak[device], used_[device]);
    if (queue < p_.stages && p_.train) {
      --forwards_left_[device];
      if (p_.lead[batch] == batch) {
        ++in_flight_[device * p_.stages + queue];
        if (lender_) lender_->admit(device, queue, batch);
      }
    }
    events_.emplace(now + seconds, code);
  }

  // A device is too small for one micro-batch: start the first one, whatever it takes.
  bool start_anyway(double now) {
    int64_t best = -1, best_rank = 0, best_stage = 0, best_device = 0;
    for (int64_t d = 0; d < p_.devices; ++d) {
      for (int64_t i = p_.queue_offset[d]; i < p_.queue_offset[d + 1]; ++i) {
        const int64_t stage = p_.queue[i];
        if (stage >= p_.stages || waiting_[i].empty()) continue;
        const int64_t first = waiting_[i].top();
        if (best < 0 || first < best_rank || (first == best_rank && stage > best_stage)) {
          best = i, best_rank = first, best_stage = stage, best_device = d;
        }
      }
    }
    if (best < 0) return false;
    waiting_[best].pop();
    begin(best_device, best_stage, p_.turn[best_rank], now);
    return true;
  }

  const mflex_schedule_problem& p_;
  Lender* lender_;
  std::vector<int64_t> rank_;
  std::vector<Heap> waiting_;   // by queue: what must be admitted, if it is a forward
  std::vector<Heap> admitted_;  // by queue: slices of chains that were
  // Kept from pass to pass of a thread: to get them anew takes as long as to fill them.
  LargeVector<Operation>& ops_;  // by place
  LargeVector<Edge>& edges_;
  std::vector<int64_t> in_flight_;
  std::vector<double> used_;
  std::vector<int64_t> forwards_left_;
  std::vector<double> work_left_;
  std::vector<int64_t> placed_;
  std::vector<char> idle_, after_backward_, is_touched_;
  std::vector<int64_t> touched_;
  Links links_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  int64_t started_ = 0;
};

// The number of operations of the given order that could be run.
int64_t replay(const mflex_schedule_problem& p) {
  const int64_t total = p.kinds * p.stages * p.batches;
  std::vector<int64_t> needs(p.needs, p.needs + total);
  std::vector<double> arrived(total), free(p.devices), used(p.devices);
  std::vector<char> queued(p.devices, 1);
  Links links(p.devices);
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
          arrival = links.cross(device, to, end, p.wire[e]);
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
