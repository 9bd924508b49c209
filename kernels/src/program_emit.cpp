// Instruction lists of placed operations; megatron_flex/schedule/emit.py says what their order must
// be, and has what this reads. tests/oracles/emit.py is the same in Python; the tests ask for the
// same lists.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "api.h"
#include "large.h"
#include "links.h"
#include "program.h"

// Mirrored by megatron_flex/schedule/emit.py; all fields are eight bytes.
struct mflex_emit_problem {
  int64_t stages, batches, kinds;
  int64_t placed;   // devices that have an order
  int64_t devices;  // lists to write
  int64_t slabs, reductions, moves, recuts, pieces, drops;
  int64_t posted;                // receives that are posted ahead
  const int64_t* device;         // [operations], where each runs
  const int64_t* offset;         // [operations + 1], into target
  const int64_t* target;         // [edges], operations that wait for it
  const double* wire;            // [edges], seconds on the link
  const int64_t* order_offset;   // [placed + 1], into order
  const int64_t* order;          // operations of each device in turn
  const int64_t* sequence;       // [operations], positions in one order over all devices
  const double* start;           // [operations]
  const double* finish;          // [operations]
  const int64_t* reduced;        // [reductions], slabs in the order of issue
  const double* ready;           // [reductions], seconds
  const int64_t* after;          // [reductions], position of the operation that it follows
  const int64_t* scattered;      // [reductions]
  const int64_t* reduce_group;   // [reductions], index of the group; of one member: -1
  const int64_t* member_offset;  // [reductions + 1], into member
  const int64_t* member;         // ascending
  const int64_t* gather_group;   // [slabs], index of the group that gathers it; -1
  const int64_t* move;           // [moves, 4]: slab, source, target, early
  const int64_t* recut;          // [recuts, 4]: device, slab, start, stop
  const int64_t* piece;          // [pieces, 5]: slab, source, target, start, stop
  const int64_t* drop;           // [drops, 2]: slab, device; slabs ascend
  uint64_t* words;               // out
  int64_t* word_offset;          // [devices + 1], out
};

namespace mflex {
namespace {

using Words = std::vector<uint64_t>;

class Emitter {
 public:
  explicit Emitter(const mflex_emit_problem& p)
      : p_(p),
        out_(p.words),
        members_{p.member_offset, p.member},
        sender_(total(), -1),
        posted_(total(), -1.0),
        queues_(p.placed),
        receives_(p.placed),
        own_(p.devices),
        first_(p.devices),
        late_(p.devices),
        dropped_(p.devices) {
    state_messages();
    line_up_messages();
    line_up_receives();
    for (int64_t r = 0; r < p.reductions; ++r) {
      for (auto m = members_.begin(r); m != members_.end(r); ++m) own_[*m].push_back(r);
    }
  }

  void run() {
    for (int64_t device = 0; device < p_.devices; ++device) {
      p_.word_offset[device] = out_ - p_.words;
      out_ = std::copy(first_[device].begin(), first_[device].end(), out_);
      compute(device);
      norms(device);
      put(kGlobalNorm);
      updates(device);
    }
    p_.word_offset[p_.devices] = out_ - p_.words;
  }

 private:
  // What waits for the messages of one device at another, in the order of sending.
  struct Queue {
    std::vector<int64_t> waiting;
    size_t next = 0;
    double free = 0.0;  // when the last message has crossed
  };
  // The message that `waiting` needs is received before `before` runs.
  struct Receive {
    int64_t waiting, before;
  };

  int64_t total() const { return p_.kinds * p_.stages * p_.batches; }
  int64_t stage_of(int64_t code) const { return code / p_.batches % p_.stages; }
  int64_t batch_of(int64_t code) const { return code % p_.batches; }
  bool forward(int64_t code) const { return code < p_.stages * p_.batches; }

  void put(int64_t op, int64_t low = 0, int64_t middle = 0, int64_t high = 0) {
    *out_++ = word(op, low, middle, high);
  }

  // What travels before anything is computed, and what is handed over and given up at the end.
  void state_messages() {
    for (int64_t i = 0; i < p_.moves; ++i) {
      const int64_t *m = p_.move + 4 * i, slab = m[0], source = m[1], target = m[2];
      if (m[3]) {
        first_[source].push_back(word(kSendState, slab, target));
        first_[target].push_back(word(kRecvState, slab, source));
      } else {
        late_[source].push_back(word(kSendState, slab, target));
        late_[target].push_back(word(kRecvState, slab, source));
      }
    }
    for (int64_t i = 0; i < p_.recuts; ++i) {
      const int64_t* r = p_.recut + 4 * i;
      ranged(&first_[r[0]], word(kRecut, r[1]), r[2], r[3]);
    }
    for (int64_t i = 0; i < p_.pieces; ++i) {
      const int64_t *q = p_.piece + 5 * i, slab = q[0], source = q[1], target = q[2];
      ranged(&first_[source], word(kSendPiece, slab, target), q[3], q[4]);
      ranged(&first_[target], word(kRecvPiece, slab, source), q[3], q[4]);
    }
    for (int64_t i = 0; i < p_.drops; ++i) {
      dropped_[p_.drop[2 * i + 1]].push_back(p_.drop[2 * i]);
    }
  }

  static void ranged(Words* list, uint64_t first, int64_t start, int64_t stop) {
    list->insert(list->end(), {first, static_cast<uint64_t>(start), static_cast<uint64_t>(stop)});
  }

  // Every message by its pair of devices, in the order in which its operations run.
  void line_up_messages() {
    for (int64_t device = 0; device < p_.placed; ++device) {
      for (int64_t i = p_.order_offset[device]; i < p_.order_offset[device + 1]; ++i) {
        const int64_t code = p_.order[i];
        for (int64_t e = p_.offset[code]; e < p_.offset[code + 1]; ++e) {
          const int64_t target = p_.target[e];
          if (p_.device[target] == device) continue;
          sender_[target] = static_cast<int32_t>(code);
          queues_.at(device, p_.device[target]).waiting.push_back(target);
        }
      }
    }
  }

  // What each device receives, in order, and when it posts that. With what an operation needs comes
  // what the same sender has sent before.
  void line_up_receives() {
    for (int64_t device = 0; device < p_.placed; ++device) {
      auto& own = receives_[device];
      for (int64_t i = p_.order_offset[device]; i < p_.order_offset[device + 1]; ++i) {
        const int64_t code = p_.order[i];
        if (sender_[code] < 0 || posted_[code] >= 0.0) continue;
        Queue& messages = queues_.at(p_.device[sender_[code]], device);
        for (int64_t waiting = -1; waiting != code;) {
          waiting = messages.waiting[messages.next++];
          const int64_t ahead = static_cast<int64_t>(own.size()) - p_.posted;
          posted_[waiting] = ahead < 0 ? 0.0 : p_.start[own[ahead].before];
          own.push_back({waiting, code});
        }
      }
    }
  }

  // Operations of one device with their messages and reductions.
  void compute(int64_t device) {
    const auto& own = own_[device];
    size_t next = 0, received = 0, gone = 0;
    std::vector<double> taken;  // when each message that was sent is, and all before it
    const auto reduce = [&](int64_t r) {
      if (members_.size(r) > 1) {
        put(p_.scattered[r] ? kScatterGradient : kReduceGradient, p_.reduced[r],
            p_.reduce_group[r]);
      }
    };
    if (device < p_.placed) {
      const auto& receives = receives_[device];
      for (int64_t i = p_.order_offset[device]; i < p_.order_offset[device + 1]; ++i) {
        const int64_t code = p_.order[i];
        while (next < own.size() && is_before(own[next], code)) reduce(own[next++]);
        for (; received < receives.size() && receives[received].before == code; ++received) {
          const int64_t sent = sender_[receives[received].waiting];
          put(forward(sent) ? kRecvActivation : kRecvGradient, stage_of(sent), p_.device[sent],
              batch_of(sent));
        }
        while (gone < taken.size() && taken[gone] < p_.start[code]) ++gone;
        const int64_t kind = code / (p_.stages * p_.batches);
        const int64_t backward = p_.kinds > 2 ? kBackwardInput : kBackward;
        put(kind == 0   ? kForward
            : kind == 1 ? backward
                        : kBackwardWeight,
            stage_of(code), static_cast<int64_t>(taken.size() - gone), batch_of(code));
        for (int64_t e = p_.offset[code]; e < p_.offset[code + 1]; ++e) {
          const int64_t peer = p_.device[p_.target[e]];
          if (peer == device) continue;
          double& free = queues_.at(device, peer).free;
          free = std::max({p_.finish[code], posted_[p_.target[e]], free}) + p_.wire[e];
          taken.push_back(taken.empty() ? free : std::max(free, taken.back()));
          put(forward(code) ? kSendActivation : kSendGradient, stage_of(code), peer,
              batch_of(code));
        }
      }
    }
    while (next < own.size()) reduce(own[next++]);
  }

  bool is_before(int64_t reduction, int64_t code) const {
    return std::make_pair(p_.ready[reduction], p_.after[reduction]) <
           std::make_pair(p_.start[code], p_.sequence[code]);
  }

  // The first holder counts a norm, of a scattered slab each its own part's.
  void norms(int64_t device) {
    for (const int64_t r : own_[device]) {
      if (p_.scattered[r] || *members_.begin(r) == device) put(kSquaredNorm, p_.reduced[r]);
    }
  }

  // The updates of one device, what it hands over after them, and what it gives up.
  void updates(int64_t device) {
    const auto& gone = dropped_[device];
    const auto& late = late_[device];
    const auto has = [](const std::vector<int64_t>& in, int64_t slab) {
      return std::find(in.begin(), in.end(), slab) != in.end();
    };
    std::vector<int64_t> sent, slabs, dropped;
    for (const uint64_t w : late) {
      const Step step = Reader(&w, &w + 1).look();
      if (step.op == kSendState) sent.push_back(step.slab());
    }
    for (const int64_t r : own_[device]) slabs.push_back(p_.reduced[r]);
    std::sort(slabs.begin(), slabs.end());
    for (const int64_t slab : slabs) {
      if (has(gone, slab)) dropped.push_back(slab);
    }
    const auto update = [&](int64_t slab) {
      put(kUpdateOrSkip, slab);
      if (p_.gather_group[slab] >= 0) put(kGatherParameters, slab, p_.gather_group[slab]);
    };
    // What others wait for comes first.
    for (const int64_t slab : slabs) {
      if (has(sent, slab)) update(slab);
    }
    for (const int64_t slab : slabs) {
      if (!has(sent, slab) && !has(dropped, slab)) update(slab);
    }
    // What comes may need the memory of what goes.
    for (const int64_t slab : dropped) {
      if (!has(sent, slab)) put(kDrop, slab);
    }
    out_ = std::copy(late.begin(), late.end(), out_);
    for (const int64_t slab : dropped) {
      if (has(sent, slab)) put(kDrop, slab);
    }
  }

  const mflex_emit_problem& p_;
  uint64_t* out_;
  Rows members_;
  LargeVector<int32_t> sender_;  // of each operation: whose message it needs; -1
  LargeVector<double> posted_;   // when the receive of that is posted
  Links<Queue> queues_;
  std::vector<std::vector<Receive>> receives_;
  std::vector<std::vector<int64_t>> own_;  // reductions of each device, in the order of issue
  std::vector<Words> first_, late_;        // of each device
  std::vector<std::vector<int64_t>> dropped_;
};

}  // namespace
}  // namespace mflex

// Writes the lists of all devices one after the other; `words` must have room for all of them.
MFLEX_API void mflex_program_emit(const mflex_emit_problem* problem) {
  mflex::Emitter(*problem).run();
}
