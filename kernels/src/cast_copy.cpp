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
// Bytes read and written from which on a cast writes past the caches.
constexpr int64_t kStreamTraffic = 2 * kStreamBytes;

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

// Past the caches, in the order of StreamCopy: pages of the source side by side, a line of 32
// elements of the narrower type at a time.
template <typename Cast>
MFLEX_INLINE void cast_streaming(typename Cast::To* target, const typename Cast::From* source,
                                 int64_t count, const Cast& cast) {
  using From = typename Cast::From;
  using To = typename Cast::To;
  constexpr int64_t kStep = 32, kPage = 4096 / sizeof(From), kPages = 4;
  constexpr int64_t kLine = 64 / sizeof(To);
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % 64 / sizeof(To));
  head = std::min(head, count);
  cast_all(target, source, head, cast);
  int64_t done = head;
  for (; count - done >= kPages * kPage; done += kPages * kPage) {
    for (int64_t step = 0; step < kPage; step += kStep) {
      for (int64_t page = 0; page < kPages; ++page) {
        const int64_t at = done + page * kPage + step;
        for (size_t line = 0; line < kStep * sizeof(From); line += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(source + at + kPages * kPage) + line);
        }
        // Line by line: it stays in a register on its way through `part`.
        for (int64_t i = at; i < at + kStep; i += kLine) {
          alignas(64) To part[kLine];
          cast_all(part, source + i, kLine, cast);
          stream_lines<64>(target + i, part);
        }
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
  const bool streams = 6 * count >= kStreamTraffic;
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto cast = streams ? AtLevels<narrow_streaming>::pick() : AtLevels<narrow>::pick();
    cast(target + begin, source + begin, end - begin, static_cast<uint16_t>(nan_bits));
    if (streams) stream_fence();
  });
}

MFLEX_API void mflex_cast_bfloat16_to_float32(const uint16_t* source, uint32_t* target,
                                              int64_t count, int32_t threads) {
  using namespace mflex;
  const bool streams = 6 * count >= kStreamTraffic;
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto cast = streams ? AtLevels<widen_streaming>::pick() : AtLevels<widen>::pick();
    cast(target + begin, source + begin, end - begin);
    if (streams) stream_fence();
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
