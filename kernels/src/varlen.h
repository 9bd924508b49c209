// [batch, length, hidden] with padding, and [tokens, hidden] without, for rows of `row_bytes`.
#pragma once

#include "lanes.h"

namespace mflex {

// Sample b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of the packed side and the first rows of
// padded[b]. cu_seqlens has batch + 1 entries and starts at 0.
struct Varlen {
  const int32_t* cu_seqlens;
  int64_t batch;
  int64_t length;
  int64_t row_bytes;

  MFLEX_HD int64_t padded_at(int64_t sample) const { return sample * length * row_bytes; }
  MFLEX_HD int64_t packed_at(int64_t sample) const { return cu_seqlens[sample] * row_bytes; }
  MFLEX_HD int64_t bytes_of(int64_t sample) const {
    return static_cast<int64_t>(cu_seqlens[sample + 1] - cu_seqlens[sample]) * row_bytes;
  }
  // Tiles that cover one padded sample; the tiles of all samples are numbered in order.
  MFLEX_HD int64_t tiles_per_sample(int64_t tile_bytes) const {
    return (length * row_bytes + tile_bytes - 1) / tile_bytes;
  }
};

// One tile from padded to packed. Tiles in the padding have nothing to do.
MFLEX_HD void pack_tile(const Varlen& shape, char* packed, const char* padded, int64_t tile,
                        int64_t tile_bytes, int64_t lane, int64_t lanes) {
  const int64_t per_sample = shape.tiles_per_sample(tile_bytes);
  const int64_t sample = tile / per_sample, offset = tile % per_sample * tile_bytes;
  const int64_t left = shape.bytes_of(sample) - offset;
  if (left <= 0) return;
  copy_lane(packed + shape.packed_at(sample) + offset, padded + shape.padded_at(sample) + offset,
            left < tile_bytes ? left : tile_bytes, lane, lanes);
}

// One tile from packed to padded; the padding becomes zero.
MFLEX_HD void pad_tile(const Varlen& shape, char* padded, const char* packed, int64_t tile,
                       int64_t tile_bytes, int64_t lane, int64_t lanes) {
  const int64_t per_sample = shape.tiles_per_sample(tile_bytes);
  const int64_t sample = tile / per_sample, offset = tile % per_sample * tile_bytes;
  const int64_t whole = shape.length * shape.row_bytes - offset;
  const int64_t bytes = whole < tile_bytes ? whole : tile_bytes;
  int64_t used = shape.bytes_of(sample) - offset;
  used = used < 0 ? 0 : used < bytes ? used : bytes;
  char* target = padded + shape.padded_at(sample) + offset;
  copy_lane(target, packed + shape.packed_at(sample) + offset, used, lane, lanes);
  zero_lane(target + used, bytes - used, lane, lanes);
}

}  // namespace mflex
