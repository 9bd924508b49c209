#include "varlen.h"

#include "launch.h"

namespace mflex {
namespace {

constexpr int64_t kTileBytes = 16 << 10;

__global__ void __launch_bounds__(kThreads)
    varlen_pack(Varlen shape, char* packed, const char* padded, int64_t tiles) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    pack_tile(shape, packed, padded, tile, kTileBytes, threadIdx.x, blockDim.x);
  }
}

__global__ void __launch_bounds__(kThreads)
    varlen_pad(Varlen shape, char* padded, const char* packed, int64_t tiles) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    pad_tile(shape, padded, packed, tile, kTileBytes, threadIdx.x, blockDim.x);
  }
}

}  // namespace
}  // namespace mflex

// cu_seqlens lies in device memory and is not checked: the host need not wait for it.
MFLEX_API int32_t mflex_cuda_varlen_pack(const char* padded, char* packed,
                                         const int32_t* cu_seqlens, int64_t batch, int64_t length,
                                         int64_t row_bytes, int64_t stream) {
  const mflex::Varlen shape{cu_seqlens, batch, length, row_bytes};
  const int64_t tiles = batch * shape.tiles_per_sample(mflex::kTileBytes);
  if (tiles == 0) return cudaSuccess;
  mflex::varlen_pack<<<mflex::blocks_for(tiles), mflex::kThreads, 0, mflex::as_stream(stream)>>>(
      shape, packed, padded, tiles);
  return cudaGetLastError();
}

MFLEX_API int32_t mflex_cuda_varlen_pad(const char* packed, char* padded, const int32_t* cu_seqlens,
                                        int64_t batch, int64_t length, int64_t row_bytes,
                                        int64_t stream) {
  const mflex::Varlen shape{cu_seqlens, batch, length, row_bytes};
  const int64_t tiles = batch * shape.tiles_per_sample(mflex::kTileBytes);
  if (tiles == 0) return cudaSuccess;
  mflex::varlen_pad<<<mflex::blocks_for(tiles), mflex::kThreads, 0, mflex::as_stream(stream)>>>(
      shape, padded, packed, tiles);
  return cudaGetLastError();
}
