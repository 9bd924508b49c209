// Segment copy, casts and varlen pack and pad. Buffers on the heap have their exact size, so that
// AddressSanitizer sees one byte too many; segments start at any alignment.
#include "copies.h"

#include <algorithm>
#include <cstring>

#include "random.h"
#include "stream_copy.h"

namespace {

int64_t address(const void* pointer) {
  return reinterpret_cast<int64_t>(pointer);
}

uint16_t rounded(uint32_t bits, uint16_t nan_bits) {
  // By search among the two neighbours, in exact arithmetic.
  float value;
  std::memcpy(&value, &bits, 4);
  if (value != value) return nan_bits;
  const uint32_t below = bits & 0xffff0000u, rest = bits & 0xffffu;
  const bool up = rest > 0x8000u || (rest == 0x8000u && (below >> 16 & 1));
  return static_cast<uint16_t>((below >> 16) + up);
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

void test_casts(Random& random) {
  const bool large = random.between(0, 9) == 0;
  const int64_t count = random.between(0, large ? 1600000 : 70);
  const int64_t shift = random.between(0, 9), other = random.between(0, 9);
  std::vector<uint32_t> wide(static_cast<size_t>(shift + count)), back(shift + count);
  std::vector<uint16_t> narrow(static_cast<size_t>(other + count)), by_lanes(other + count);
  for (uint32_t& bits : wide) {
    bits = static_cast<uint32_t>(random.next());
    if (random.between(0, 3) == 0) bits |= 0x7f800000u;                 // infinities and NaN
    if (random.between(0, 3) == 0) bits = (bits & ~0xffffu) | 0x8000u;  // ties
  }
  const uint16_t nan_bits = random.between(0, 1) ? 0x7fc0 : 0xffff;
  const int32_t threads = static_cast<int32_t>(random.between(0, 4));
  mflex_cast_float32_to_bfloat16(wide.data() + shift, narrow.data() + other, count, nan_bits,
                                 threads);
  mflex_cast_float32_to_bfloat16_by_lanes(wide.data() + shift, by_lanes.data() + other, count,
                                          nan_bits, random.between(1, 40));
  for (int64_t i = 0; i < count; ++i)
    CHECK(narrow[other + i] == rounded(wide[shift + i], nan_bits));
  CHECK(narrow == by_lanes);
  mflex_cast_bfloat16_to_float32(narrow.data() + other, back.data() + shift, count, threads);
  for (int64_t i = 0; i < count; ++i) {
    CHECK(back[shift + i] == static_cast<uint32_t>(narrow[other + i]) << 16);
  }
  std::vector<uint32_t> again(back.size());
  mflex_cast_bfloat16_to_float32_by_lanes(narrow.data() + other, again.data() + shift, count,
                                          random.between(1, 40));
  CHECK(back == again);
}

void test_varlen(Random& random) {
  const int64_t batch = random.between(0, 6), length = random.between(1, 30);
  const int64_t row = random.between(0, 5) == 0 ? random.between(1, 9000) : random.between(1, 70);
  std::vector<int32_t> cu_seqlens{0};
  for (int64_t b = 0; b < batch; ++b) {
    cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(random.between(0, length)));
  }
  std::vector<char> padded = random.bytes(batch * length * row), expected, packed, by_lanes;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t used = (cu_seqlens[b + 1] - cu_seqlens[b]) * row;
    const auto begin = padded.begin() + b * length * row;
    expected.insert(expected.end(), begin, begin + used);
    std::fill(begin + used, begin + length * row, 0);
  }
  packed.resize(expected.size());
  by_lanes.resize(expected.size());
  const int32_t threads = static_cast<int32_t>(random.between(0, 4));
  const int64_t tile_bytes = random.between(1, 4000), lanes = random.between(1, 40);
  CHECK(mflex_varlen_pack(padded.data(), packed.data(), cu_seqlens.data(), batch, length, row,
                          threads) == 0);
  CHECK(packed == expected);
  mflex_varlen_by_lanes(padded.data(), by_lanes.data(), cu_seqlens.data(), batch, length, row, 0,
                        tile_bytes, lanes);
  CHECK(by_lanes == expected);
  std::vector<char> back = random.bytes(batch * length * row), back_by_lanes = back;
  CHECK(mflex_varlen_pad(packed.data(), back.data(), cu_seqlens.data(), batch, length, row,
                         threads) == 0);
  CHECK(back == padded);
  mflex_varlen_by_lanes(packed.data(), back_by_lanes.data(), cu_seqlens.data(), batch, length, row,
                        1, tile_bytes, lanes);
  CHECK(back_by_lanes == padded);
}
