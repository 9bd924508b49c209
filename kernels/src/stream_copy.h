// Copies that do not bring the target into the caches: for totals that would not stay there anyway.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mflex {

// From this total on, a kernel writes past the caches: about twice a core's second-level cache. The
// read that a plain store makes of its target is then a third of all traffic.
constexpr int64_t kStreamBytes = 4 << 20;

// Copies past the caches, several of them one after the other. Bytes are in place only after
// finish(): whole pages are collected, also from several copies, and copied four side by side. The
// prefetchers follow one stream in each, and together they keep more reads in flight than a single
// stream does (measured: 10 GB/s against 7).
class StreamCopy {
 public:
  // As memcpy(target, source, bytes).
  void add(char* target, const char* source, int64_t bytes);
  // Copies what is left and orders all bytes before whatever this thread stores next.
  void finish();

 private:
  static constexpr int kPages = 4;
  template <int pages>
  void copy_pages();

  char* targets_[kPages];
  const char* sources_[kPages];
  int collected_ = 0;
};

// One copy past the caches, its bytes in place for whoever sees this thread's later stores.
void stream_copy(char* target, const char* source, int64_t bytes);

// `bytes`, a multiple of 16, to a target at a 16-byte boundary, past the caches. The processor
// joins the stores of one cache line.
template <int bytes>
MFLEX_INLINE void stream_lines(void* target, const void* source) {
#if defined(__SSE2__)
  __m128i part[bytes / 16];
  for (int i = 0; i < bytes / 16; ++i) {
    part[i] = _mm_loadu_si128(static_cast<const __m128i*>(source) + i);
  }
  for (int i = 0; i < bytes / 16; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(target) + i, part[i]);
  }
#else
  std::memcpy(target, source, bytes);
#endif
}

// Orders the streamed lines of this thread before whatever it stores next.
void stream_fence();

}  // namespace mflex
