#include "stream_copy.h"

namespace mflex {
namespace {

constexpr int64_t kLine = 64, kPage = 4096;

}  // namespace

// Hints that go past a source's end do nothing.
template <int pages>
void StreamCopy::copy_pages() {
  // Local, so that the compiler knows that the stores do not change them.
  char* targets[pages];
  const char* sources[pages];
  for (int page = 0; page < pages; ++page) {
    targets[page] = targets_[page];
    sources[page] = sources_[page];
  }
  for (int64_t line = 0; line < kPage; line += kLine) {
    for (int page = 0; page < pages; ++page) {
      __builtin_prefetch(sources[page] + line + kPages * kPage);
      stream_lines<kLine>(targets[page] + line, sources[page] + line);
    }
  }
}

void StreamCopy::add(char* target, const char* source, int64_t bytes) {
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & (kLine - 1));
  if (head > bytes) head = bytes;
  std::memcpy(target, source, static_cast<size_t>(head));
  target += head;
  source += head;
  bytes -= head;
  // Pages that lie together need no list (5 % faster).
  for (; collected_ == 0 && bytes >= kPages * kPage; bytes -= kPages * kPage) {
    for (int64_t line = 0; line < kPage; line += kLine) {
      for (int64_t at = line; at < kPages * kPage; at += kPage) {
        __builtin_prefetch(source + at + kPages * kPage);
        stream_lines<kLine>(target + at, source + at);
      }
    }
    target += kPages * kPage;
    source += kPages * kPage;
  }
  for (; bytes >= kPage; bytes -= kPage) {
    targets_[collected_] = target;
    sources_[collected_] = source;
    if (++collected_ == kPages) {
      copy_pages<kPages>();
      collected_ = 0;
    }
    target += kPage;
    source += kPage;
  }
  for (; bytes >= kLine; bytes -= kLine) {
    __builtin_prefetch(source + 2 * kPage);
    stream_lines<kLine>(target, source);
    target += kLine;
    source += kLine;
  }
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

void StreamCopy::finish() {
  while (collected_ > 0) {
    copy_pages<1>();
    --collected_;
    targets_[0] = targets_[collected_];
    sources_[0] = sources_[collected_];
  }
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
