// Elements of type float32 or bfloat16, loaded to and stored from float32.
#pragma once

#include <cstdint>

#include "api.h"

namespace mflex {

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

}  // namespace mflex
