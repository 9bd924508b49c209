// What workers do in the arena of the TwinLayer manager beside copying chunks: keep a slab's state
// with its checksum, and read and write single words that other processes see.
#include <sys/mman.h>

#include "checksum.h"
#include "chunks.h"
#include "stream_copy.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

// The checksum of bytes in chunks: XXH64 of each chunk, seeded with that of the chunks before it.
MFLEX_API uint64_t mflex_twin_checksum(const char* data, int64_t bytes, int64_t chunk_bytes) {
  const mflex::Chunks chunks{bytes, chunk_bytes};
  uint64_t hash = 0;
  for (int64_t i = 0; i < chunks.count(); ++i) {
    hash = mflex::xxh64(data + chunks.begin(i), static_cast<uint64_t>(chunks.size(i)), hash);
  }
  return hash;
}

// As mflex_chunked_write on one thread; returns the checksum of the source, which is computed while
// a chunk is in the cache.
MFLEX_API uint64_t mflex_twin_save(const char* source, char* target, int64_t bytes,
                                   int64_t chunk_bytes, uint64_t* flags, uint64_t version) {
  const mflex::Chunks chunks{bytes, chunk_bytes};
  uint64_t hash = 0;
  for (int64_t i = 0; i < chunks.count(); ++i) {
    const int64_t at = chunks.begin(i), size = chunks.size(i);
    __atomic_exchange_n(&flags[i], uint64_t{0}, __ATOMIC_ACQ_REL);
    // What is kept for recovery is not read again soon: it must not push work out of the caches.
    mflex::copy_by(mflex::way_of(mflex::kStreamBytes), target + at, source + at, size);
    hash = mflex::xxh64(source + at, static_cast<uint64_t>(size), hash);
    __atomic_store_n(&flags[i], version, __ATOMIC_RELEASE);
  }
  return hash;
}

MFLEX_API uint64_t mflex_twin_load(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

MFLEX_API void mflex_twin_store(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

MFLEX_API void mflex_twin_add(uint64_t* word, uint64_t value) {
  __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}

// Raises a word to `value` if it is below it.
MFLEX_API void mflex_twin_raise(uint64_t* word, uint64_t value) {
  uint64_t found = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  while (found < value && !__atomic_compare_exchange_n(word, &found, value, true, __ATOMIC_ACQ_REL,
                                                       __ATOMIC_ACQUIRE)) {
  }
}

// For readers that cannot use mflex_chunked_read: their target is not in host memory.
MFLEX_API uint64_t mflex_twin_wait(const uint64_t* flag, uint64_t version, int64_t timeout_ns) {
  return mflex::wait_for(flag, version, timeout_ns);
}

// Makes the page tables of shared memory ahead of its use, so that a copy meets no page faults. The
// address is that of a page.
MFLEX_API void mflex_twin_touch(char* address, int64_t bytes) {
  if (bytes <= 0 || madvise(address, static_cast<size_t>(bytes), MADV_POPULATE_READ) == 0) return;
  for (int64_t at = 0; at < bytes; at += 4096) {  // before Linux 5.14
    (void)*static_cast<volatile char*>(address + at);
  }
}
