// A copy in chunks that says after each chunk that it is there, so that a reader in another process
// starts after the first one.
//
// Chunk i has a flag of 64 bits in memory that both sides see. It holds the version of the bytes in
// the chunk, or 0 while they are being written: a writer that dies in the middle leaves no chunk
// that passes for whole. Versions are above 0 and only grow.
#pragma once

#include "lanes.h"

namespace mflex {

struct Chunks {
  int64_t bytes;
  int64_t chunk_bytes;

  MFLEX_HD int64_t count() const { return (bytes + chunk_bytes - 1) / chunk_bytes; }
  MFLEX_HD int64_t begin(int64_t chunk) const { return chunk * chunk_bytes; }
  MFLEX_HD int64_t size(int64_t chunk) const {
    const int64_t left = bytes - begin(chunk);
    return left < chunk_bytes ? left : chunk_bytes;
  }
};

// Waits until a chunk's flag holds `version` or a newer one, at most `timeout_ns`; returns what it
// holds.
uint64_t wait_for(const uint64_t* flag, uint64_t version, int64_t timeout_ns);

}  // namespace mflex
