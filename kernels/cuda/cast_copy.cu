#include "cast.h"

#include "launch.h"

namespace mflex {
namespace {

__global__ void __launch_bounds__(kThreads)
    narrow(uint16_t* target, const uint32_t* source, int64_t count, uint16_t nan_bits) {
  const int64_t lanes = static_cast<int64_t>(gridDim.x) * blockDim.x;
  narrow_lane(target, source, count, nan_bits,
              static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, lanes);
}

__global__ void __launch_bounds__(kThreads)
    widen(uint32_t* target, const uint16_t* source, int64_t count) {
  const int64_t lanes = static_cast<int64_t>(gridDim.x) * blockDim.x;
  widen_lane(target, source, count, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
             lanes);
}

// One lane casts eight elements at a time.
unsigned cast_blocks(int64_t count) {
  return blocks_for((count / 8 + kThreads) / kThreads);
}

}  // namespace
}  // namespace mflex

MFLEX_API int32_t mflex_cuda_cast_float32_to_bfloat16(const uint32_t* source, uint16_t* target,
                                                      int64_t count, uint32_t nan_bits,
                                                      int64_t stream) {
  if (count == 0) return cudaSuccess;
  mflex::narrow<<<mflex::cast_blocks(count), mflex::kThreads, 0, mflex::as_stream(stream)>>>(
      target, source, count, static_cast<uint16_t>(nan_bits));
  return cudaGetLastError();
}

MFLEX_API int32_t mflex_cuda_cast_bfloat16_to_float32(const uint16_t* source, uint32_t* target,
                                                      int64_t count, int64_t stream) {
  if (count == 0) return cudaSuccess;
  mflex::widen<<<mflex::cast_blocks(count), mflex::kThreads, 0, mflex::as_stream(stream)>>>(
      target, source, count);
  return cudaGetLastError();
}
