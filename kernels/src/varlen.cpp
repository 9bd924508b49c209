#include "varlen.h"

#include <vector>

#include "copies.h"
#include "segments.h"

namespace mflex {
namespace {

// On the CPU both directions are segment copies: a sample's rows lie together on either side.
struct Copies {
  std::vector<int64_t> sources, targets, sizes;

  void add(const void* source, void* target, int64_t size) {
    sources.push_back(reinterpret_cast<int64_t>(source));
    targets.push_back(reinterpret_cast<int64_t>(target));
    sizes.push_back(size);
  }
  void run(int threads) const {
    const int64_t count = static_cast<int64_t>(sizes.size());
    copy_segments({sources.data(), targets.data(), sizes.data(), nullptr, count}, threads);
  }
};

// 0, or 1 + the first sample whose rows are no range of the padded side.
int64_t first_bad_sample(const Varlen& shape) {
  if (shape.batch > 0 && shape.cu_seqlens[0] != 0) return 1;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t rows = int64_t{shape.cu_seqlens[b + 1]} - shape.cu_seqlens[b];
    if (rows < 0 || rows > shape.length) return b + 1;
  }
  return 0;
}

}  // namespace
}  // namespace mflex

MFLEX_API int64_t mflex_varlen_pack(const char* padded, char* packed, const int32_t* cu_seqlens,
                                    int64_t batch, int64_t length, int64_t row_bytes,
                                    int32_t threads) {
  const mflex::Varlen shape{cu_seqlens, batch, length, row_bytes};
  if (const int64_t bad = mflex::first_bad_sample(shape)) return bad;
  mflex::Copies copies;
  for (int64_t b = 0; b < batch; ++b) {
    copies.add(padded + shape.padded_at(b), packed + shape.packed_at(b), shape.bytes_of(b));
  }
  copies.run(threads);
  return 0;
}

MFLEX_API int64_t mflex_varlen_pad(const char* packed, char* padded, const int32_t* cu_seqlens,
                                   int64_t batch, int64_t length, int64_t row_bytes,
                                   int32_t threads) {
  const mflex::Varlen shape{cu_seqlens, batch, length, row_bytes};
  if (const int64_t bad = mflex::first_bad_sample(shape)) return bad;
  mflex::Copies copies;
  for (int64_t b = 0; b < batch; ++b) {
    char* target = padded + shape.padded_at(b);
    const int64_t used = shape.bytes_of(b);
    copies.add(packed + shape.packed_at(b), target, used);
    copies.add(nullptr, target + used, length * row_bytes - used);
  }
  copies.run(threads);
  return 0;
}

MFLEX_API void mflex_varlen_by_lanes(const char* source, char* target, const int32_t* cu_seqlens,
                                     int64_t batch, int64_t length, int64_t row_bytes, int32_t pad,
                                     int64_t tile_bytes, int64_t lanes) {
  const mflex::Varlen shape{cu_seqlens, batch, length, row_bytes};
  for (int64_t tile = 0; tile < batch * shape.tiles_per_sample(tile_bytes); ++tile) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      if (pad) {
        mflex::pad_tile(shape, target, source, tile, tile_bytes, lane, lanes);
      } else {
        mflex::pack_tile(shape, target, source, tile, tile_bytes, lane, lanes);
      }
    }
  }
}
