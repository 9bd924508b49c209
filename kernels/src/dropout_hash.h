// Keyed dropout: whether an element stays is a hash of (token, site, channel), not of a generator.
//
// The row key is splitmix64's finaliser over the token's key and the site's. The element hash is
// "lowbias32" with the row key split over its rounds. megatron_flex/model/keys.py has the same
// functions in Python and in torch operations; tests compare the bits.
#pragma once

#include <cstdint>

#include "api.h"

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

// bfloat16 as its 16 bits, rounded to nearest even as torch does.
struct BFloat16 {
  uint16_t bits;
};

MFLEX_HD float load(const float& value) {
  return value;
}

MFLEX_HD float load(const BFloat16& value) {
  union {
    uint32_t bits;
    float value;
  } word;
  word.bits = static_cast<uint32_t>(value.bits) << 16;
  return word.value;
}

MFLEX_HD void store(float& target, float value) {
  target = value;
}

MFLEX_HD void store(BFloat16& target, float value) {
  union {
    float value;
    uint32_t bits;
  } word;
  word.value = value;
  const uint32_t rounded = word.bits + 0x7FFFu + ((word.bits >> 16) & 1u);
  target.bits = static_cast<uint16_t>(value != value ? 0x7FC0u : rounded >> 16);
}

// residual + dropout(x + bias) of one element; absent terms are given as 0 and cost nothing.
template <typename T, bool kBias, bool kResidual>
MFLEX_HD void bias_dropout_add_element(const T* x, const T* bias, const T* residual, T* out,
                                       int64_t channel, RowKey key, uint32_t threshold,
                                       float scale) {
  float y = load(x[channel]);
  if (kBias) y = rounded_add(y, load(bias[channel]));
  y = keeps(key, static_cast<uint32_t>(channel), threshold) ? rounded_mul(y, scale) : 0.0f;
  if (kResidual) y = rounded_add(load(residual[channel]), y);
  store(out[channel], y);
}

}  // namespace mflex
