// Many copies as one launch: segments are cut into tiles of at most `tile_bytes`, a block takes
// whole tiles.
#pragma once

#include "lanes.h"

namespace mflex {

// Segment i copies sizes[i] bytes from sources[i] to targets[i] (addresses). Its tiles are
// first_tile[i] to first_tile[i + 1] - 1; an empty segment has none.
struct Segments {
  const int64_t* sources;
  const int64_t* targets;
  const int64_t* sizes;
  const int64_t* first_tile;
  int64_t count;
};

// The segment that `position` falls into, for ascending `first` with first[0] = 0: the last one
// that starts at or before it, so that empty segments are passed over.
MFLEX_HD int64_t find_segment(const int64_t* first, int64_t count, int64_t position) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

MFLEX_HD void copy_tile(const Segments& all, int64_t tile, int64_t tile_bytes, int64_t lane,
                        int64_t lanes) {
  const int64_t s = find_segment(all.first_tile, all.count, tile);
  const int64_t offset = (tile - all.first_tile[s]) * tile_bytes;
  const int64_t left = all.sizes[s] - offset;
  copy_lane(reinterpret_cast<char*>(all.targets[s]) + offset,
            reinterpret_cast<const char*>(all.sources[s]) + offset,
            left < tile_bytes ? left : tile_bytes, lane, lanes);
}

}  // namespace mflex
