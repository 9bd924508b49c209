// Streams are integers (cudaStream_t); every entry returns a cudaError_t as an integer, 0 is
// success.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "api.h"

namespace mflex {

constexpr int kThreads = 256;
// Enough blocks to fill any device; each takes further tiles in turn.
constexpr int64_t kMaxBlocks = 132 * 16;

inline unsigned blocks_for(int64_t tiles) {
  return static_cast<unsigned>(tiles < 1 ? 1 : tiles < kMaxBlocks ? tiles : kMaxBlocks);
}

inline cudaStream_t as_stream(int64_t stream) {
  return reinterpret_cast<cudaStream_t>(stream);
}

}  // namespace mflex
