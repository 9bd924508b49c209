#include "stream_copy.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

namespace mflex {
namespace {

// Seconds that `copy` takes on this thread's own clock, which stands while others have the core,
// with source and target out of the caches before.
template <typename Copy>
double seconds_of(char* target, char* source, int64_t bytes, const Copy& copy) {
#if defined(__SSE2__)
  for (int64_t at = 0; at < bytes; at += kLine) {
    _mm_clflush(source + at);
    _mm_clflush(target + at);
  }
#endif
  timespec begin, end;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  copy(target, source, bytes);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  return static_cast<double>(end.tv_sec - begin.tv_sec) +
         1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
}

// A plain copy leaves the write of its lines to whoever needs their place in the cache, half as
// much traffic again: so it must be faster than that to be better.
bool streams_well() {
  constexpr int64_t kBytes = 512 << 10;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kPage, 2 * kBytes)), &std::free);
  if (memory == nullptr) return true;
  std::memset(memory.get(), 1, 2 * kBytes);
  double plain = 1e9, stream = 1e9;
  for (int round = 0; round < 3; ++round) {
    char *target = memory.get(), *source = target + kBytes;
    stream = std::min(stream, seconds_of(target, source, kBytes, stream_copy));
    plain = std::min(plain, seconds_of(target, source, kBytes, [](char* t, char* s, int64_t n) {
                       std::memcpy(t, s, static_cast<size_t>(n));
                     }));
  }
  return stream < 1.5 * plain;
}

bool choose() {
  const char* wish = std::getenv("MEGATRON_FLEX_COPY");
  const std::string way = wish == nullptr ? "" : wish;
  return way == "stream" || (way != "memcpy" && streams_well());
}

}  // namespace

bool streams(int64_t total) {
  if (total < kStreamBytes) return false;
  static const bool chosen = choose();
  return chosen;
}

template <bool ahead>
void StreamCopy::advance() {
  for (int page = 0; page < now_.count; ++page) {
    char* const target = now_.targets[page];
    const char* const source = now_.sources[page];
    const int64_t flip = flip_of(target, source), fetched = page * kPage / kPages;
    for (int64_t line = 0; line < kPage / kLine; ++line) {
      if (ahead) fetch_line(next_.sources[line % kPages] + fetched + line / kPages * kLine);
      const int64_t at = line * kLine ^ flip;
      stream_lines<kLine>(target + at, source + at);
    }
  }
  now_ = next_;
  next_.count = 0;
}

void StreamCopy::add(char* target, const char* source, int64_t bytes) {
  const int64_t head =
      std::min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & (kLine - 1)), bytes);
  std::memcpy(target, source, static_cast<size_t>(head));
  target += head;
  source += head;
  bytes -= head;
  for (; bytes >= kPage; bytes -= kPage) {
    next_.targets[next_.count] = target;
    next_.sources[next_.count] = source;
    if (++next_.count == kPages) advance<true>();
    target += kPage;
    source += kPage;
  }
  for (; bytes >= kLine; bytes -= kLine) {
    stream_lines<kLine>(target, source);
    target += kLine;
    source += kLine;
  }
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

void StreamCopy::finish() {
  advance<false>();
  advance<false>();
  stream_fence();
}

void stream_copy(char* target, const char* source, int64_t bytes) {
  StreamCopy stream;
  stream.add(target, source, bytes);
  stream.finish();
}

void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace mflex
