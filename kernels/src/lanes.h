// Bodies that GPU and CPU share: work is split over `lanes`, of which this call is number `lane`.
// A CUDA thread is one lane; the CPU's test form calls the same body once for each lane.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"

namespace mflex {

struct alignas(16) Vector {
  uint32_t word[4];
};

// An aligned load or store of a whole T. On the host, memcpy keeps to the aliasing rules.
template <typename T>
MFLEX_HD T load(const void* address) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const T*>(address);
#else
  T value;
  std::memcpy(&value, __builtin_assume_aligned(address, alignof(T)), sizeof(T));
  return value;
#endif
}

template <typename T>
MFLEX_HD void store(void* address, T value) {
#if defined(__CUDA_ARCH__)
  *static_cast<T*>(address) = value;
#else
  std::memcpy(__builtin_assume_aligned(address, alignof(T)), &value, sizeof(T));
#endif
}

// Bytes from `address` to the next 16-byte boundary, at most `size`.
MFLEX_HD int64_t bytes_to_boundary(const void* address, int64_t size) {
  const int64_t gap = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(address) & 15);
  return gap < size ? gap : size;
}

// 16-byte stores to an aligned target, from a source that is aligned to Word only.
template <typename Word>
MFLEX_HD void copy_vectors(char* target, const char* source, int64_t vectors, int64_t lane,
                           int64_t lanes) {
  constexpr int kWords = static_cast<int>(sizeof(Vector) / sizeof(Word));
  union Parts {
    Vector whole;
    Word part[kWords];
  };
  for (int64_t v = lane; v < vectors; v += lanes) {
    Parts value;
    for (int w = 0; w < kWords; ++w) {
      value.part[w] = load<Word>(source + 16 * v + static_cast<int64_t>(sizeof(Word)) * w);
    }
    store<Vector>(target + 16 * v, value.whole);
  }
}

// Lane `lane`'s part of copying `size` bytes at any alignment: single bytes up to the target's
// 16-byte boundary, vectors, then the tail. The source is never read out of its bounds.
MFLEX_HD void copy_lane(char* target, const char* source, int64_t size, int64_t lane,
                        int64_t lanes) {
  const int64_t head = bytes_to_boundary(target, size);
  for (int64_t i = lane; i < head; i += lanes) target[i] = source[i];
  target += head;
  source += head;
  const int64_t vectors = (size - head) / 16;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(source);
  if (offset % 16 == 0) {
    copy_vectors<Vector>(target, source, vectors, lane, lanes);
  } else if (offset % 8 == 0) {
    copy_vectors<uint64_t>(target, source, vectors, lane, lanes);
  } else if (offset % 4 == 0) {
    copy_vectors<uint32_t>(target, source, vectors, lane, lanes);
  } else if (offset % 2 == 0) {
    copy_vectors<uint16_t>(target, source, vectors, lane, lanes);
  } else {
    copy_vectors<uint8_t>(target, source, vectors, lane, lanes);
  }
  for (int64_t i = 16 * vectors + lane; i < size - head; i += lanes) target[i] = source[i];
}

}  // namespace mflex
