#include <algorithm>
#include <vector>

#include "copies.h"
#include "parallel.h"
#include "segments.h"
#include "stream_copy.h"

namespace mflex {
namespace {

// A thread gets no less than this: waking one costs about as much as copying it.
constexpr int64_t kGrain = 256 << 10;

// Copies bytes [begin, end) of the segments laid end to end; segment i starts at first_byte[i] of
// them.
void copy_range(const Segments& all, const int64_t* first_byte, int64_t begin, int64_t end,
                Way way) {
  StreamCopy past(way);
  const bool stream = way != Way::kMemcpy;
  for (int64_t s = find_segment(first_byte, all.count, begin); begin < end; ++s) {
    const int64_t offset = begin - first_byte[s];
    const int64_t bytes = std::min(all.sizes[s] - offset, end - begin);
    if (bytes <= 0) continue;
    char* target = reinterpret_cast<char*>(all.targets[s]) + offset;
    const char* source = reinterpret_cast<const char*>(all.sources[s]) + offset;
    if (stream) {
      past.add(target, source, bytes);
    } else {
      std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    begin += bytes;
  }
  if (stream) past.finish();
}

}  // namespace
}  // namespace mflex

MFLEX_API void mflex_segment_copy(const int64_t* sources, const int64_t* targets,
                                  const int64_t* sizes, int64_t count, int32_t threads) {
  using namespace mflex;
  const Segments all{sources, targets, sizes, nullptr, count};
  std::vector<int64_t> first_byte(static_cast<size_t>(count) + 1, 0);
  for (int64_t i = 0; i < count; ++i) first_byte[i + 1] = first_byte[i] + sizes[i];
  const int64_t total = first_byte[count];
  const Way way = way_of(total);
  parallel_for(total, kGrain, threads, [&](int64_t begin, int64_t end) {
    copy_range(all, first_byte.data(), begin, end, way);
  });
}

MFLEX_API int64_t mflex_segment_tiles(const int64_t* sizes, int64_t count, int64_t tile_bytes,
                                      int64_t* first_tile) {
  first_tile[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    first_tile[i + 1] = first_tile[i] + (sizes[i] + tile_bytes - 1) / tile_bytes;
  }
  return first_tile[count];
}

MFLEX_API void mflex_segment_copy_by_lanes(const int64_t* sources, const int64_t* targets,
                                           const int64_t* sizes, const int64_t* first_tile,
                                           int64_t count, int64_t tile_bytes, int64_t lanes) {
  const mflex::Segments all{sources, targets, sizes, first_tile, count};
  for (int64_t tile = 0; tile < (count > 0 ? first_tile[count] : 0); ++tile) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      mflex::copy_tile(all, tile, tile_bytes, lane, lanes);
    }
  }
}
