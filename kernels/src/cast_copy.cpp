#include <algorithm>
#include <cstring>

#include "cast.h"
#include "copies.h"
#include "level.h"
#include "parallel.h"
#include "stream_copy.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 64 << 10;  // elements

struct Narrow {
  using From = uint32_t;
  using To = uint16_t;
  uint16_t nan_bits;
  MFLEX_INLINE To operator()(From value) const { return to_bfloat16(value, nan_bits); }
};

struct Widen {
  using From = uint16_t;
  using To = uint32_t;
  MFLEX_INLINE To operator()(From value) const { return to_float32(value); }
};

template <typename Cast>
MFLEX_INLINE void cast_all(typename Cast::To* __restrict target,
                           const typename Cast::From* __restrict source, int64_t count,
                           const Cast& cast) {
  for (int64_t i = 0; i < count; ++i) target[i] = cast(source[i]);
}

// Past the caches. Lines of the next eight pages are fetched in turn, then cast in their order, see
// StreamCopy; what is left of eight pages is cast plainly.
template <typename Cast>
MFLEX_INLINE void cast_streaming(typename Cast::To* target, const typename Cast::From* source,
                                 int64_t count, const Cast& cast) {
  using From = typename Cast::From;
  using To = typename Cast::To;
  constexpr int64_t kStep = 32, kPages = 8;  // a step is a line of the narrower type
  constexpr int64_t kGroup = kPages * kPage / sizeof(From), kPart = kLine / sizeof(To);
  constexpr int64_t kFetches = kStep * sizeof(From) / kLine;
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine / sizeof(To));
  head = std::min(head, count);
  cast_all(target, source, head, cast);
  int64_t done = head;
  for (; count - done >= kGroup; done += kGroup) {
    const char* const next = reinterpret_cast<const char*>(source + done + kGroup);
    for (int64_t step = 0; step < kGroup / kStep; ++step) {
      for (int64_t line = step * kFetches; line < (step + 1) * kFetches; ++line) {
        fetch_line(next + line % kPages * kPage + line / kPages * kLine);
      }
      // Line by line: it stays in a register on its way through `part`.
      for (int64_t i = done + step * kStep; i < done + (step + 1) * kStep; i += kPart) {
        alignas(kLine) To part[kPart];
        cast_all(part, source + i, kPart, cast);
        stream_lines<kLine>(target + i, part);
      }
    }
  }
  cast_all(target + done, source + done, count - done, cast);
}

MFLEX_INLINE void narrow(uint16_t* target, const uint32_t* source, int64_t count,
                         uint16_t nan_bits) {
  cast_all(target, source, count, Narrow{nan_bits});
}

MFLEX_INLINE void narrow_streaming(uint16_t* target, const uint32_t* source, int64_t count,
                                   uint16_t nan_bits) {
  cast_streaming(target, source, count, Narrow{nan_bits});
}

MFLEX_INLINE void widen(uint32_t* target, const uint16_t* source, int64_t count) {
  cast_all(target, source, count, Widen{});
}

MFLEX_INLINE void widen_streaming(uint32_t* target, const uint16_t* source, int64_t count) {
  cast_streaming(target, source, count, Widen{});
}

}  // namespace
}  // namespace mflex

MFLEX_API void mflex_cast_float32_to_bfloat16(const uint32_t* source, uint16_t* target,
                                              int64_t count, uint32_t nan_bits, int32_t threads) {
  using namespace mflex;
  const bool past = streams(3 * count);
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto cast = past ? AtLevels<narrow_streaming>::pick() : AtLevels<narrow>::pick();
    cast(target + begin, source + begin, end - begin, static_cast<uint16_t>(nan_bits));
    if (past) stream_fence();
  });
}

MFLEX_API void mflex_cast_bfloat16_to_float32(const uint16_t* source, uint32_t* target,
                                              int64_t count, int32_t threads) {
  using namespace mflex;
  const bool past = streams(3 * count);
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto cast = past ? AtLevels<widen_streaming>::pick() : AtLevels<widen>::pick();
    cast(target + begin, source + begin, end - begin);
    if (past) stream_fence();
  });
}

MFLEX_API void mflex_cast_float32_to_bfloat16_by_lanes(const uint32_t* source, uint16_t* target,
                                                       int64_t count, uint32_t nan_bits,
                                                       int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    mflex::narrow_lane(target, source, count, static_cast<uint16_t>(nan_bits), lane, lanes);
  }
}

MFLEX_API void mflex_cast_bfloat16_to_float32_by_lanes(const uint16_t* source, uint32_t* target,
                                                       int64_t count, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    mflex::widen_lane(target, source, count, lane, lanes);
  }
}
