// Gradients as fixed-point integers: sums of them are exact, so they do not depend on the order or
// on the number of parts. One pass adds a float32 gradient to an int64 sum and clears it; another
// turns the finished sum back to float32.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "api.h"
#include "level.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 1 << 15;            // elements
constexpr double kLimit = 2251799813685248.0;  // 2^51
constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52

// Adding kMagic puts the integer part of a double below 2^51 into its low bits, rounded to the
// nearest even: unlike a conversion, this has a vector form at every instruction level.
MFLEX_INLINE int64_t to_integer(double value) {
  const double shifted = value + kMagic;
  int64_t bits, offset;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&offset, &kMagic, sizeof offset);
  return bits - offset;
}

enum Verdict { kFine = 0, kTooLarge = 1, kNotFinite = 2 };

MFLEX_INLINE int accumulate(float* __restrict gradient, int64_t* __restrict sum, int64_t count,
                            double scale) {
  int64_t large = 0, not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = static_cast<double>(gradient[i]) * scale;
    large += !(std::fabs(value) < kLimit);
    not_finite += !(std::fabs(value) <= std::numeric_limits<double>::max());
    sum[i] += to_integer(value);
    gradient[i] = 0.0f;
  }
  return not_finite ? kNotFinite : large ? kTooLarge : kFine;
}

MFLEX_INLINE void finish(int64_t* __restrict sum, float* __restrict gradient, int64_t count,
                         double step) {
  for (int64_t i = 0; i < count; ++i) {
    gradient[i] = static_cast<float>(static_cast<double>(sum[i]) * step);
    sum[i] = 0;
  }
}

}  // namespace
}  // namespace mflex

// Adds round(gradient * 2^bits) to sum and sets gradient to zero. Returns 1 if an element was at
// least 2^(51 - bits), 2 if one was NaN or infinite: the sum is then of no use.
MFLEX_API int32_t mflex_fixed_accumulate(float* gradient, int64_t* sum, int64_t count, int32_t bits,
                                         int32_t threads) {
  std::atomic<int> worst{mflex::kFine};
  const double scale = std::ldexp(1.0, bits);
  mflex::parallel_for(count, mflex::kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto function = mflex::AtLevels<mflex::accumulate>::pick();
    const int found = function(gradient + begin, sum + begin, end - begin, scale);
    int known = worst.load(std::memory_order_relaxed);
    while (known < found && !worst.compare_exchange_weak(known, found)) {
    }
  });
  return worst.load();
}

// Writes sum * 2^-bits to gradient and sets sum to zero.
MFLEX_API void mflex_fixed_finish(int64_t* sum, float* gradient, int64_t count, int32_t bits,
                                  int32_t threads) {
  const double step = std::ldexp(1.0, -bits);
  mflex::parallel_for(count, mflex::kGrain, threads, [&](int64_t begin, int64_t end) {
    const auto function = mflex::AtLevels<mflex::finish>::pick();
    function(sum + begin, gradient + begin, end - begin, step);
  });
}
