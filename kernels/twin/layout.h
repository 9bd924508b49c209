// What lies where in the arena: the memory that the manager of a server shares with its workers.
//
//   page 0                Header
//   banks                 one version of the slabs' state each, for recovery
//   room                  slabs on their way from one worker to another
//
// A slab's state in a bank or in the room is an entry: EntryHeader, one flag of 64 bits for each
// chunk (kernels/src/chunks.h), then from the next page on the bytes. The manager alone places
// entries; workers write states, flags and bytes. Nobody ever holds a lock, so a process may die
// at any moment. megatron_flex/twinlayer/arena.py mirrors this file.
#pragma once

#include <cstdint>

namespace mflex::twin {

constexpr uint64_t kMagic = 0x314e495754584c46;  // "FLXTWIN1"
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMinChunk = 64 << 10, kMaxChunk = 1 << 20;

struct Header {
  uint64_t magic;
  uint64_t committed;  // newest version that is known to be complete on all servers; 0: none
};

enum State : uint64_t { kWriting = 1, kComplete = 2, kLost = 3 };

struct EntryHeader {
  uint64_t state;     // kLost: the writer ended before it was done
  uint64_t version;   // what a chunk's flag holds when the chunk is there
  uint64_t checksum;  // of the bytes, when complete; 0 in the room
  uint64_t taken;     // readers that are done with it
  uint64_t bytes;
  uint64_t chunk_bytes;
  uint64_t slab;
  uint64_t source;  // rank of the writer
};
static_assert(sizeof(EntryHeader) == 64);

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t chunk_count(uint64_t bytes, uint64_t chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

// From an entry's header to its bytes.
constexpr uint64_t data_offset(uint64_t bytes, uint64_t chunk_bytes) {
  return round_up(sizeof(EntryHeader) + 8 * chunk_count(bytes, chunk_bytes), kPage);
}

// The most that an entry for a slab of `bytes` takes, whatever its chunks.
constexpr uint64_t entry_bytes(uint64_t bytes) {
  return data_offset(bytes, kMinChunk) + round_up(bytes, kPage);
}

// Small enough that a reader starts early, large enough that flags cost nothing. Of `transfers` at
// a time a reader seldom waits for the one it takes, so their chunks may be larger.
constexpr uint64_t chunk_bytes_for(uint64_t bytes, uint64_t transfers = 1) {
  uint64_t chunk = kMaxChunk;
  while (chunk > kMinChunk && transfers * chunk_count(bytes, chunk) < 16) chunk /= 2;
  return chunk;
}

inline uint64_t load(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

}  // namespace mflex::twin
