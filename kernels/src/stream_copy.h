// Copies that do not bring the target into the caches: for totals that would not stay there anyway.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mflex {

constexpr int64_t kLine = 64, kPage = 4096;

// From this total on, a kernel writes past the caches: about twice a core's second-level cache. The
// read that a plain store makes of its target is then a third of all traffic.
constexpr int64_t kStreamBytes = 4 << 20;

// How much is copied at once.
enum class Way {
  kMemcpy,   // plainly, through the caches
  kPages,    // past the caches, page by page
  kAbreast,  // past the caches, four pages side by side
};

// How `total` bytes are copied: plainly up to kStreamBytes, from there on by the way that does best
// on this processor. The first call with so many bytes measures them, in about 15 ms;
// MEGATRON_FLEX_COPY=memcpy, pages or abreast in the environment forgoes it.
Way way_of(int64_t total);

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

// Asks for a line that is read soon, into the second-level cache: it has room for all of them.
MFLEX_INLINE void fetch_line(const char* address) {
  __builtin_prefetch(address, 0, 2);
}

// What turns an offset into the order in which lines are best copied: 0 for upwards, else
// downwards (offset ^ flip). A load waits for an older store, not yet written, whose address has
// the same low 12 bits: such a store exists where the target lies little above the source in its
// page, and upwards is the way of both. AMD's guides tell of it, and glibc's memcpy does the same.
MFLEX_INLINE int64_t flip_of(const char* target, const char* source) {
  const int64_t above = (target - source) & (kPage - 1);
  return above > 0 && above < kPage / 2 ? kPage - kLine : 0;
}

// Copies past the caches, several of them one after the other. Bytes are in place only after
// finish(): whole pages are collected, also from several copies, and a processor follows one stream
// of reads in each page, so that several keep more reads in flight than one. By pages, lines of
// eight pages are fetched in turn, then copied page by page; abreast, lines of four pages are
// copied in turn. The latter is the faster one on Intel processors; on AMD's, stores in turn to
// several pages, whose addresses are alike in their low bits, hold up the loads (a quarter of
// memcpy's speed).
class StreamCopy {
 public:
  // `way`: pages or abreast.
  explicit StreamCopy(Way way) : abreast_(way == Way::kAbreast) {}
  // As memcpy(target, source, bytes).
  void add(char* target, const char* source, int64_t bytes);
  // Copies what is left and orders all bytes before whatever this thread stores next.
  void finish();

 private:
  static constexpr int kPages = 8, kAbreast = 4;
  struct Group {
    char* targets[kPages];
    const char* sources[kPages];
    int count = 0;
  };
  // Copies `now_`, fetches the lines of `next_` meanwhile, if there are any, and goes on to them.
  template <bool ahead>
  void advance();
  template <bool ahead>
  void advance_by_pages();
  template <bool ahead>
  void advance_abreast();

  const bool abreast_;
  Group now_, next_;
};

// One copy, its bytes in place for whoever sees this thread's later stores.
void copy_by(Way way, char* target, const char* source, int64_t bytes);

// Orders the streamed lines of this thread before whatever it stores next.
void stream_fence();

}  // namespace mflex
