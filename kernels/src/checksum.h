// XXH64, the 64-bit xxHash: the checksum of host copies of layers.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"

namespace mflex {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                   kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                   kPrime5 = 0x27D4EB2F165667C5;

MFLEX_INLINE uint64_t rotated(uint64_t x, int by) {
  return x << by | x >> (64 - by);
}

template <typename Word>
MFLEX_INLINE uint64_t word_at(const char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

MFLEX_INLINE uint64_t xxh_round(uint64_t lane, uint64_t word) {
  return rotated(lane + word * kPrime2, 31) * kPrime1;
}

MFLEX_INLINE uint64_t xxh64(const char* data, uint64_t bytes, uint64_t seed) {
  const char* const end = data + bytes;
  uint64_t hash = seed + kPrime5;
  if (bytes >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - data >= 32; data += 32) {
      for (int i = 0; i < 4; ++i) {
        lanes[i] = xxh_round(lanes[i], word_at<uint64_t>(data + 8 * i));
      }
    }
    hash =
        rotated(lanes[0], 1) + rotated(lanes[1], 7) + rotated(lanes[2], 12) + rotated(lanes[3], 18);
    for (uint64_t lane : lanes) hash = (hash ^ xxh_round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += bytes;
  for (; end - data >= 8; data += 8) {
    hash = rotated(hash ^ xxh_round(0, word_at<uint64_t>(data)), 27) * kPrime1 + kPrime4;
  }
  if (end - data >= 4) {
    hash = rotated(hash ^ word_at<uint32_t>(data) * kPrime1, 23) * kPrime2 + kPrime3;
    data += 4;
  }
  for (; data < end; ++data) {
    hash = rotated(hash ^ word_at<uint8_t>(data) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace mflex
