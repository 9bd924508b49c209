// Copies that change between fp32 and bfloat16, the upper half of an fp32.
#pragma once

#include "lanes.h"

namespace mflex {

// Round to nearest, ties to even. A value that is not a number becomes `nan_bits`: PyTorch's own
// choice differs between its CPU and CUDA code and between vector levels, so the caller says.
MFLEX_HD uint16_t to_bfloat16(uint32_t bits, uint16_t nan_bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan_bits : static_cast<uint16_t>(rounded);
}

MFLEX_HD uint32_t to_float32(uint16_t bits) {
  return static_cast<uint32_t>(bits) << 16;
}

// Elements of `size` bytes from `address` to the next 16-byte boundary, at most `count`.
MFLEX_HD int64_t elements_to_boundary(const void* address, int64_t size, int64_t count) {
  const int64_t elements = bytes_to_boundary(address, 16) / size;
  return elements < count ? elements : count;
}

// Lane `lane`'s part of casting `count` elements, each aligned to its own size. Eight at a time
// where both sides come to a 16-byte boundary together, one at a time elsewhere.
MFLEX_HD void narrow_lane(uint16_t* target, const uint32_t* source, int64_t count,
                          uint16_t nan_bits, int64_t lane, int64_t lanes) {
  int64_t head = elements_to_boundary(target, 2, count);
  if (reinterpret_cast<uintptr_t>(source + head) % 16 != 0) head = count;
  for (int64_t i = lane; i < head; i += lanes) {
    store<uint16_t>(target + i, to_bfloat16(load<uint32_t>(source + i), nan_bits));
  }
  const int64_t groups = (count - head) / 8;
  for (int64_t g = lane; g < groups; g += lanes) {
    const Vector low = load<Vector>(source + head + 8 * g);
    const Vector high = load<Vector>(source + head + 8 * g + 4);
    Vector packed;
    for (int w = 0; w < 4; ++w) {
      const Vector& from = w < 2 ? low : high;
      const uint32_t first = to_bfloat16(from.word[2 * w % 4], nan_bits);
      const uint32_t second = to_bfloat16(from.word[2 * w % 4 + 1], nan_bits);
      packed.word[w] = first | second << 16;
    }
    store<Vector>(target + head + 8 * g, packed);
  }
  for (int64_t i = head + 8 * groups + lane; i < count; i += lanes) {
    store<uint16_t>(target + i, to_bfloat16(load<uint32_t>(source + i), nan_bits));
  }
}

MFLEX_HD void widen_lane(uint32_t* target, const uint16_t* source, int64_t count, int64_t lane,
                         int64_t lanes) {
  int64_t head = elements_to_boundary(source, 2, count);
  if (reinterpret_cast<uintptr_t>(target + head) % 16 != 0) head = count;
  for (int64_t i = lane; i < head; i += lanes) {
    store<uint32_t>(target + i, to_float32(load<uint16_t>(source + i)));
  }
  const int64_t groups = (count - head) / 8;
  for (int64_t g = lane; g < groups; g += lanes) {
    const Vector packed = load<Vector>(source + head + 8 * g);
    Vector part[2];
    for (int w = 0; w < 4; ++w) {
      part[w / 2].word[2 * w % 4] = packed.word[w] << 16;
      part[w / 2].word[2 * w % 4 + 1] = packed.word[w] & 0xffff0000u;
    }
    store<Vector>(target + head + 8 * g, part[0]);
    store<Vector>(target + head + 8 * g + 4, part[1]);
  }
  for (int64_t i = head + 8 * groups + lane; i < count; i += lanes) {
    store<uint32_t>(target + i, to_float32(load<uint16_t>(source + i)));
  }
}

}  // namespace mflex
