// Keyed dropout: whether an element stays is a hash of (token, site, channel), not of a generator.
//
// The row key is splitmix64's finaliser over the token's key and the site's. The element hash is
// "lowbias32" with the row key split over its rounds. megatron_flex/model/keys.py has the same
// functions in Python and in torch operations; tests compare the bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "api.h"
#include "floats.h"

namespace mflex {

struct RowKey {
  uint32_t low, high;
};

MFLEX_HD RowKey row_key(int64_t token, uint64_t site) {
  uint64_t z = static_cast<uint64_t>(token) ^ site;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z = z ^ (z >> 31);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// True if element `channel` of the row stays. `threshold` is the drop probability times 2^32.
MFLEX_HD bool keeps(RowKey key, uint32_t channel, uint32_t threshold) {
  uint32_t x = channel * 0x9E3779B1u + key.low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ key.high) * 0x846CA68Bu;
  x = x ^ (x >> 16);
  return x >= threshold;
}

// Products and sums that are rounded each on its own, so that the CPU, CUDA and torch forms agree.
MFLEX_HD float rounded_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MFLEX_HD float rounded_add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// out = residual + dropout(x + bias) over [rows, columns]; bias and residual may be null.
template <typename T>
struct BiasDropoutAdd {
  const T *x, *bias, *residual;
  const int64_t* tokens;  // [rows] key of each row
  uint64_t site;
  int64_t rows, columns;
  uint32_t threshold;
  float scale;
  T* out;
};

template <typename T, bool kBias, bool kResidual>
MFLEX_HD void bias_dropout_add_element(const T& x, const T& bias, const T& residual, T& out,
                                       int64_t channel, RowKey key, uint32_t threshold,
                                       float scale) {
  float y = load(x);
  if (kBias) y = rounded_add(y, load(bias));
  y = keeps(key, static_cast<uint32_t>(channel), threshold) ? rounded_mul(y, scale) : 0.0f;
  if (kResidual) y = rounded_add(load(residual), y);
  store(out, y);
}

// What one thread of a CUDA block does: rows block, block + blocks, ...; in each, kWidth columns at
// a time, which are loaded and stored as one word. Columns must be a multiple of kWidth.
template <typename T, bool kBias, bool kResidual, int kWidth>
MFLEX_HD void bias_dropout_add_lane(const BiasDropoutAdd<T>& a, int64_t block, int64_t blocks,
                                    int64_t thread, int64_t threads) {
  struct alignas(sizeof(T) * kWidth) Word {
    T values[kWidth];
  };
  for (int64_t row = block; row < a.rows; row += blocks) {
    const RowKey key = row_key(a.tokens[row], a.site);
    for (int64_t c = thread * kWidth; c < a.columns; c += threads * kWidth) {
      const int64_t at = row * a.columns + c;
      const Word x = *reinterpret_cast<const Word*>(a.x + at);
      Word bias{}, residual{}, out;
      if (kBias) bias = *reinterpret_cast<const Word*>(a.bias + c);
      if (kResidual) residual = *reinterpret_cast<const Word*>(a.residual + at);
      for (int i = 0; i < kWidth; ++i) {
        bias_dropout_add_element<T, kBias, kResidual>(x.values[i], bias.values[i],
                                                      residual.values[i], out.values[i], c + i, key,
                                                      a.threshold, a.scale);
      }
      *reinterpret_cast<Word*>(a.out + at) = out;
    }
  }
}

// Columns that one thread may take at a time: 16 bytes' worth where everything is aligned to that.
template <typename T>
inline bool whole_words(const BiasDropoutAdd<T>& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return a.columns % static_cast<int64_t>(16 / sizeof(T)) == 0 && aligned(a.x) && aligned(a.bias) &&
         aligned(a.residual) && aligned(a.out);
}

// Calls visit<kBias, kResidual, kWidth>() with the flags that fit `a`.
template <typename T, typename Visitor>
inline void with_flags(const BiasDropoutAdd<T>& a, Visitor&& visit) {
  constexpr int kWide = static_cast<int>(16 / sizeof(T));
  const auto width = [&](auto bias, auto residual) {
    if (whole_words(a)) {
      visit(bias, residual, std::integral_constant<int, kWide>{});
    } else {
      visit(bias, residual, std::integral_constant<int, 1>{});
    }
  };
  const auto residual = [&](auto bias) {
    if (a.residual != nullptr) {
      width(bias, std::true_type{});
    } else {
      width(bias, std::false_type{});
    }
  };
  if (a.bias != nullptr) {
    residual(std::true_type{});
  } else {
    residual(std::false_type{});
  }
}

template <typename T>
inline BiasDropoutAdd<T> bias_dropout_add_of(const void* x, const void* bias, const void* residual,
                                             const int64_t* tokens, uint64_t site, int64_t rows,
                                             int64_t columns, uint32_t threshold, float scale,
                                             void* out) {
  return {static_cast<const T*>(x),
          static_cast<const T*>(bias),
          static_cast<const T*>(residual),
          tokens,
          site,
          rows,
          columns,
          threshold,
          scale,
          static_cast<T*>(out)};
}

}  // namespace mflex
