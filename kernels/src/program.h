// Instruction lists as 64-bit words; megatron_flex/schedule/compact.py says which bits are what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mflex {

// In the order of NAMES in megatron_flex/schedule/instructions.py.
enum Op : int64_t {
  kForward,
  kBackward,
  kBackwardInput,
  kBackwardWeight,
  kSendActivation,
  kRecvActivation,
  kSendGradient,
  kRecvGradient,
  kReduceGradient,
  kScatterGradient,
  kSquaredNorm,
  kGlobalNorm,
  kUpdateOrSkip,
  kGatherParameters,
  kSendState,
  kRecvState,
  kRecut,
  kSendPiece,
  kRecvPiece,
  kDrop,
  kOps
};

// Fields by what they hold: stage or slab; peer, group or messages under way; micro-batch. Ranges
// only of some.
struct Step {
  int64_t op, low, middle, high, start, stop;

  int64_t stage() const { return low; }
  int64_t slab() const { return low; }
  int64_t peer() const { return middle; }
  int64_t group() const { return middle; }
  int64_t under_way() const { return middle; }
  int64_t batch() const { return high; }
  bool same(const Step& o) const {
    return op == o.op && low == o.low && middle == o.middle && high == o.high && start == o.start &&
           stop == o.stop;
  }
};

inline uint64_t word(int64_t op, int64_t low = 0, int64_t middle = 0, int64_t high = 0) {
  return static_cast<uint64_t>(op | low << 6 | middle << 24 | high << 44);
}

inline bool has_range(int64_t op) {
  return op == kRecut || op == kSendPiece || op == kRecvPiece;
}
inline bool is_compute(int64_t op) {
  return op <= kBackwardWeight;
}
inline bool is_transfer(int64_t op) {
  return op >= kSendActivation && op <= kRecvGradient;
}
inline bool is_receive(int64_t op) {
  return op == kRecvActivation || op == kRecvGradient;
}

// One device's list, step by step.
class Reader {
 public:
  Reader(const uint64_t* begin, const uint64_t* end) : at_(begin), end_(end) {}

  bool done() const { return at_ == end_; }
  const uint64_t* at() const { return at_; }

  // The step here; a range that is cut off has the operation kOps.
  Step look() const {
    const uint64_t w = *at_;
    Step step{static_cast<int64_t>(w & 63),
              static_cast<int64_t>(w >> 6 & 0x3FFFF),
              static_cast<int64_t>(w >> 24 & 0xFFFFF),
              static_cast<int64_t>(w >> 44),
              0,
              0};
    if (has_range(step.op)) {
      if (end_ - at_ < 3) {
        step.op = kOps;
      } else {
        step.start = static_cast<int64_t>(at_[1]), step.stop = static_cast<int64_t>(at_[2]);
      }
    }
    return step;
  }

  void next() {
    const bool range = has_range(static_cast<int64_t>(*at_ & 63));
    at_ = range && end_ - at_ >= 3 ? at_ + 3 : at_ + 1;
  }

  Step take() {
    const Step step = look();
    next();
    return step;
  }

 private:
  const uint64_t* at_;
  const uint64_t* end_;
};

// Rows of numbers of different lengths: those of row i are [offset[i], offset[i + 1]).
struct Rows {
  const int64_t* offset;
  const int64_t* value;

  const int64_t* begin(int64_t row) const { return value + offset[row]; }
  const int64_t* end(int64_t row) const { return value + offset[row + 1]; }
  int64_t size(int64_t row) const { return offset[row + 1] - offset[row]; }
};

}  // namespace mflex
