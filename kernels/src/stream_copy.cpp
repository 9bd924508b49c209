#include "stream_copy.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

namespace mflex {
namespace {

// Seconds that a copy of the second half of `memory` to its first takes on this thread's own clock,
// which stands while others have the core, with both out of the caches before.
double seconds_of(Way way, char* memory, int64_t bytes) {
#if defined(__SSE2__)
  for (int64_t at = 0; at < 2 * bytes; at += kLine) _mm_clflush(memory + at);
#endif
  timespec begin, end;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  copy_by(way, memory, memory + bytes, bytes);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  return static_cast<double>(end.tv_sec - begin.tv_sec) +
         1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
}

// A plain copy leaves the write of its lines to whoever needs their place in the cache, half as
// much traffic again: so it must be faster than that to be better.
Way measured() {
  constexpr int64_t kBytes = 512 << 10;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kPage, 2 * kBytes)), &std::free);
  if (memory == nullptr) return Way::kPages;
  std::memset(memory.get(), 1, 2 * kBytes);
  double plain = 1e9, pages = 1e9, abreast = 1e9;
  for (int round = 0; round < 3; ++round) {
    pages = std::min(pages, seconds_of(Way::kPages, memory.get(), kBytes));
    abreast = std::min(abreast, seconds_of(Way::kAbreast, memory.get(), kBytes));
    plain = std::min(plain, seconds_of(Way::kMemcpy, memory.get(), kBytes));
  }
  if (std::min(pages, abreast) > 1.5 * plain) return Way::kMemcpy;
  // What is copied here is small. In large memory pages abreast gain a fifth on processors where
  // the two are alike here; on those that don't bear them they take four times as long here too.
  return abreast < 1.5 * pages ? Way::kAbreast : Way::kPages;
}

Way choose() {
  const char* wish = std::getenv("MEGATRON_FLEX_COPY");
  const std::string way = wish == nullptr ? "" : wish;
  if (way == "memcpy") return Way::kMemcpy;
  if (way == "pages") return Way::kPages;
  return way == "abreast" ? Way::kAbreast : measured();
}

}  // namespace

Way way_of(int64_t total) {
  if (total < kStreamBytes) return Way::kMemcpy;
  static const Way chosen = choose();
  return chosen;
}

template <bool ahead>
void StreamCopy::advance_by_pages() {
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
}

template <bool ahead>
void StreamCopy::advance_abreast() {
  for (int first = 0; first < now_.count; first += kAbreast) {
    // Local, so that the compiler knows that the stores do not change them.
    char* targets[kAbreast];
    const char *sources[kAbreast], *fetched[kAbreast];
    const int count = std::min(kAbreast, now_.count - first);
    for (int page = 0; page < count; ++page) {
      targets[page] = now_.targets[first + page];
      sources[page] = now_.sources[first + page];
      if (ahead) fetched[page] = next_.sources[first + page];
    }
    const auto copy = [&](int pages) {
      for (int64_t at = 0; at < kPage; at += kLine) {
        for (int page = 0; page < pages; ++page) {
          if (ahead) fetch_line(fetched[page] + at);
          stream_lines<kLine>(targets[page] + at, sources[page] + at);
        }
      }
    };
    count == kAbreast ? copy(kAbreast) : copy(count);
  }
}

// There is nothing to fetch, or a whole group.
template <bool ahead>
void StreamCopy::advance() {
  abreast_ ? advance_abreast<ahead>() : advance_by_pages<ahead>();
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

void copy_by(Way way, char* target, const char* source, int64_t bytes) {
  if (way == Way::kMemcpy) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  StreamCopy stream(way);
  stream.add(target, source, bytes);
  stream.finish();
}

void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace mflex
