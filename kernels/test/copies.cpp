// Segment copy. Buffers on the heap have their exact size, so that AddressSanitizer sees one byte
// too many; segments start at any alignment.
#include "copies.h"

#include <algorithm>
#include <cstring>

#include "random.h"
#include "stream_copy.h"

namespace {

int64_t address(const void* pointer) {
  return reinterpret_cast<int64_t>(pointer);
}

}  // namespace

void test_segments(Random& random) {
  const int64_t count = random.between(0, 12);
  std::vector<std::vector<char>> tensors;
  std::vector<int64_t> sources, targets, sizes, first_tile(static_cast<size_t>(count) + 1);
  std::vector<char> expected;
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t shift = random.between(0, 17);
    const bool large = random.between(0, 9) == 0;
    const int64_t size = random.between(0, 3) == 0 ? 0 : random.between(1, large ? 600000 : 300);
    tensors.push_back(random.bytes(shift + size));
    starts.push_back(static_cast<int64_t>(expected.size()));
    sizes.push_back(size);
    expected.insert(expected.end(), tensors.back().begin() + shift, tensors.back().end());
  }
  std::vector<char> buffer(expected.size());
  for (int64_t i = 0; i < count; ++i) {
    sources.push_back(address(tensors[i].data() + tensors[i].size() - sizes[i]));
    targets.push_back(address(buffer.data() + starts[i]));
  }
  mflex_segment_copy(sources.data(), targets.data(), sizes.data(), count,
                     static_cast<int32_t>(random.between(0, 4)));
  CHECK(buffer == expected);

  std::fill(buffer.begin(), buffer.end(), 0);
  const int64_t tile_bytes = random.between(1, 4000);
  int64_t tiles = 0;
  for (int64_t size : sizes) tiles += (size + tile_bytes - 1) / tile_bytes;
  CHECK(mflex_segment_tiles(sizes.data(), count, tile_bytes, first_tile.data()) == tiles);
  mflex_segment_copy_by_lanes(sources.data(), targets.data(), sizes.data(), first_tile.data(),
                              count, tile_bytes, random.between(1, 40));
  CHECK(buffer == expected);
}

void test_streams(Random& random) {
  std::vector<char> target(400000), expected;
  for (char& byte : target) byte = static_cast<char>(random.next());
  expected = target;
  std::vector<std::vector<char>> sources;
  mflex::StreamCopy stream(random.between(0, 1) ? mflex::Way::kPages : mflex::Way::kAbreast);
  int64_t end = 0;
  for (int64_t copies = random.between(0, 8); copies > 0; --copies) {
    const int64_t size = random.between(0, random.between(0, 2) == 0 ? 300 : 30000);
    const int64_t shift = random.between(0, 70), begin = end + random.between(0, 70);
    sources.push_back(random.bytes(shift + size));
    end = begin + size;
    std::copy(sources.back().begin() + shift, sources.back().end(), expected.begin() + begin);
    stream.add(target.data() + begin, sources.back().data() + shift, size);
  }
  stream.finish();
  CHECK(target == expected);
}
