#include "chunks.h"

#include "launch.h"

namespace mflex {
namespace {

// A block takes whole chunks in turn. Chunks come in order as far as blocks are scheduled in order.
// A fence over the system lies between a chunk's bytes and its flag, since the reader is a CPU.
__global__ void __launch_bounds__(1024)
    chunked_write(Chunks chunks, char* target, const char* source,
                  volatile unsigned long long* flags, unsigned long long version) {
  for (int64_t i = blockIdx.x; i < chunks.count(); i += gridDim.x) {
    if (threadIdx.x == 0) {
      flags[i] = 0;
      __threadfence_system();
    }
    __syncthreads();
    copy_lane(target + chunks.begin(i), source + chunks.begin(i), chunks.size(i), threadIdx.x,
              blockDim.x);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();  // after the barrier: orders what the other threads wrote too
      flags[i] = version;
    }
  }
}

}  // namespace
}  // namespace mflex

// From device memory to registered host memory; target and flags are device addresses of that
// memory (mflex_cuda_host_address). A reader takes the chunks with mflex_chunked_read.
MFLEX_API int32_t mflex_cuda_chunked_write(const char* source, char* target, int64_t bytes,
                                           int64_t chunk_bytes, uint64_t* flags, uint64_t version,
                                           int64_t stream) {
  const mflex::Chunks chunks{bytes, chunk_bytes};
  if (chunks.count() == 0) return cudaSuccess;
  // Few blocks: the link is saturated by them, and chunks then finish one after the other.
  constexpr int64_t kBlocks = 16;
  const int64_t blocks = chunks.count() < kBlocks ? chunks.count() : kBlocks;
  mflex::chunked_write<<<static_cast<unsigned>(blocks), 1024, 0, mflex::as_stream(stream)>>>(
      chunks, target, source, reinterpret_cast<volatile unsigned long long*>(flags), version);
  return cudaGetLastError();
}
