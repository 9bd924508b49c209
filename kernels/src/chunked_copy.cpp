#include <sched.h>
#include <time.h>

#include <atomic>

#include "chunks.h"
#include "copies.h"
#include "parallel.h"
#include "stream_copy.h"

namespace mflex {
namespace {

void copy_chunk(const Chunks& chunks, int64_t i, char* target, const char* source) {
  const int64_t at = chunks.begin(i), bytes = chunks.size(i);
  copy_by(way_of(chunks.bytes), target + at, source + at, bytes);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

MFLEX_INLINE void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads take the next chunk in turn, so that chunks arrive in order.
template <typename Body>
void for_each_chunk(const Chunks& chunks, int threads, const Body& body) {
  if (threads <= 0) threads = available_threads();
  std::atomic<int64_t> next{0};
  parallel_for(threads, 1, threads, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < chunks.count(); i = next.fetch_add(1)) {
      if (!body(i)) next.store(chunks.count());
    }
  });
}

}  // namespace

// It spins as long as a chunk takes to arrive, then leaves the core to others, who may be the
// writer.
uint64_t wait_for(const uint64_t* flag, uint64_t version, int64_t timeout_ns) {
  constexpr int kSpins = 4000, kYields = 200;
  int64_t deadline = 0;
  for (int64_t turn = 0;; ++turn) {
    const uint64_t found = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    if (found >= version) return found;
    if (turn < kSpins) {
      pause_cpu();
      continue;
    }
    if (turn < kSpins + kYields) {
      sched_yield();
      continue;
    }
    if (deadline == 0) deadline = now_ns() + timeout_ns;
    if (now_ns() >= deadline) return found;
    const timespec rest{0, 50000};
    nanosleep(&rest, nullptr);
  }
}

}  // namespace mflex

MFLEX_API void mflex_chunked_write(const char* source, char* target, int64_t bytes,
                                   int64_t chunk_bytes, uint64_t* flags, uint64_t version,
                                   int32_t threads) {
  const mflex::Chunks chunks{bytes, chunk_bytes};
  mflex::for_each_chunk(chunks, threads, [&](int64_t i) {
    __atomic_exchange_n(&flags[i], uint64_t{0}, __ATOMIC_ACQ_REL);
    mflex::copy_chunk(chunks, i, target, source);
    __atomic_store_n(&flags[i], version, __ATOMIC_RELEASE);
    return true;
  });
}

MFLEX_API int64_t mflex_chunked_read(const char* source, char* target, int64_t bytes,
                                     int64_t chunk_bytes, const uint64_t* flags, uint64_t version,
                                     int64_t timeout_ns, int32_t threads) {
  const mflex::Chunks chunks{bytes, chunk_bytes};
  std::atomic<int64_t> result{0};
  mflex::for_each_chunk(chunks, threads, [&](int64_t i) {
    const uint64_t before = mflex::wait_for(&flags[i], version, timeout_ns);
    if (before == version) {
      mflex::copy_chunk(chunks, i, target, source);
      // Written again while it was read: what was copied may be a mixture.
#if !defined( \
    MFLEX_SANITIZED)  // ThreadSanitizer knows no fences; the flag's own load suffices for it
      std::atomic_thread_fence(std::memory_order_acquire);
#endif
      const uint64_t after = __atomic_load_n(&flags[i], __ATOMIC_ACQUIRE);
      if (after == version) return true;
      result.store(-1 - i);
      return false;
    }
    result.store(before < version ? 1 + i : -1 - i);
    return false;
  });
  return result.load();
}
