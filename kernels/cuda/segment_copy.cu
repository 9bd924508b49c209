#include "segments.h"

#include "launch.h"

namespace mflex {
namespace {

__global__ void __launch_bounds__(kThreads)
    segment_copy(Segments all, int64_t tiles, int64_t tile_bytes) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    copy_tile(all, tile, tile_bytes, threadIdx.x, blockDim.x);
  }
}

}  // namespace
}  // namespace mflex

// The four arrays lie in device memory, as mflex_segment_tiles made them for `tile_bytes`.
MFLEX_API int32_t mflex_cuda_segment_copy(const int64_t* sources, const int64_t* targets,
                                          const int64_t* sizes, const int64_t* first_tile,
                                          int64_t count, int64_t tiles, int64_t tile_bytes,
                                          int64_t stream) {
  if (tiles == 0) return cudaSuccess;
  mflex::segment_copy<<<mflex::blocks_for(tiles), mflex::kThreads, 0, mflex::as_stream(stream)>>>(
      {sources, targets, sizes, first_tile, count}, tiles, tile_bytes);
  return cudaGetLastError();
}
