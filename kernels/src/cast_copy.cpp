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

constexpr int64_t kNarrow = 2;              // bytes of the narrower type
constexpr int64_t kStep = kLine / kNarrow;  // elements

// A step past the caches, line by line of the target: it stays in a register on its way.
template <typename Cast>
MFLEX_INLINE void cast_step(typename Cast::To* target, const typename Cast::From* source,
                            const Cast& cast) {
  constexpr int64_t kPart = kLine / sizeof(typename Cast::To);
  for (int64_t i = 0; i < kStep; i += kPart) {
    alignas(kLine) typename Cast::To part[kPart];
    cast_all(part, source + i, kPart, cast);
    stream_lines<kLine>(target + i, part);
  }
}

// Past the caches, whole groups of pages of the source, see StreamCopy; gives how many elements.
template <typename Cast>
MFLEX_INLINE int64_t cast_by_pages(typename Cast::To* target, const typename Cast::From* source,
                                   int64_t count, const Cast& cast) {
  using From = typename Cast::From;
  constexpr int64_t kPages = 8, kGroup = kPages * kPage / sizeof(From);
  constexpr int64_t kFetches = kStep * sizeof(From) / kLine;
  int64_t done = 0;
  for (; count - done >= kGroup; done += kGroup) {
    const char* const next = reinterpret_cast<const char*>(source + done + kGroup);
    for (int64_t step = 0; step < kGroup / kStep; ++step) {
      for (int64_t line = step * kFetches; line < (step + 1) * kFetches; ++line) {
        fetch_line(next + line % kPages * kPage + line / kPages * kLine);
      }
      cast_step(target + done + step * kStep, source + done + step * kStep, cast);
    }
  }
  return done;
}

template <typename Cast>
MFLEX_INLINE int64_t cast_abreast(typename Cast::To* target, const typename Cast::From* source,
                                  int64_t count, const Cast& cast) {
  using From = typename Cast::From;
  constexpr int64_t kPages = 4, kInPage = kPage / kNarrow, kGroup = kPages * kInPage;
  int64_t done = 0;
  for (; count - done >= kGroup; done += kGroup) {
    for (int64_t step = done; step < done + kInPage; step += kStep) {
      for (int64_t at = step; at < step + kGroup; at += kInPage) {
        const char* const next = reinterpret_cast<const char*>(source + at + kGroup);
        for (size_t line = 0; line < kStep * sizeof(From); line += kLine) fetch_line(next + line);
        cast_step(target + at, source + at, cast);
      }
    }
  }
  return done;
}

template <typename Cast>
MFLEX_INLINE void cast_by(Way way, typename Cast::To* target, const typename Cast::From* source,
                          int64_t count, const Cast& cast) {
  if (way != Way::kMemcpy) {
    using To = typename Cast::To;
    int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine / sizeof(To));
    head = std::min(head, count);
    cast_all(target, source, head, cast);
    target += head, source += head, count -= head;
    const int64_t done = way == Way::kPages ? cast_by_pages(target, source, count, cast)
                                            : cast_abreast(target, source, count, cast);
    target += done, source += done, count -= done;
  }
  cast_all(target, source, count, cast);
  if (way != Way::kMemcpy) stream_fence();
}

MFLEX_INLINE void narrow(uint16_t* target, const uint32_t* source, int64_t count, uint16_t nan_bits,
                         Way way) {
  cast_by(way, target, source, count, Narrow{nan_bits});
}

MFLEX_INLINE void widen(uint32_t* target, const uint16_t* source, int64_t count, Way way) {
  cast_by(way, target, source, count, Widen{});
}

}  // namespace
}  // namespace mflex

MFLEX_API void mflex_cast_float32_to_bfloat16(const uint32_t* source, uint16_t* target,
                                              int64_t count, uint32_t nan_bits, int32_t threads) {
  using namespace mflex;
  const Way way = way_of(3 * count);
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    AtLevels<narrow>::pick()(target + begin, source + begin, end - begin,
                             static_cast<uint16_t>(nan_bits), way);
  });
}

MFLEX_API void mflex_cast_bfloat16_to_float32(const uint16_t* source, uint32_t* target,
                                              int64_t count, int32_t threads) {
  using namespace mflex;
  const Way way = way_of(3 * count);
  parallel_for(count, kGrain, threads, [&](int64_t begin, int64_t end) {
    AtLevels<widen>::pick()(target + begin, source + begin, end - begin, way);
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
