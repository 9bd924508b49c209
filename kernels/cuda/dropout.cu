#include "dropout_hash.h"

#include <algorithm>

#include "launch.h"

namespace mflex {
namespace {

template <typename T, bool kBias, bool kResidual, int kWidth>
__global__ void __launch_bounds__(kThreads) bias_dropout_add(BiasDropoutAdd<T> a) {
  bias_dropout_add_lane<T, kBias, kResidual, kWidth>(a, blockIdx.x, gridDim.x, threadIdx.x,
                                                     blockDim.x);
}

template <typename T>
void launch(const BiasDropoutAdd<T>& a, int64_t stream) {
  with_flags(a, [&](auto bias, auto residual, auto width) {
    constexpr int kWidth = decltype(width)::value;
    // No more threads than a row has words, in whole warps.
    const int64_t words = (a.columns + kWidth - 1) / kWidth;
    const int64_t threads = std::min<int64_t>(kThreads, (words + 31) / 32 * 32);
    bias_dropout_add<T, decltype(bias)::value, decltype(residual)::value, kWidth>
        <<<blocks_for(a.rows), static_cast<unsigned>(threads), 0, as_stream(stream)>>>(a);
  });
}

}  // namespace
}  // namespace mflex

MFLEX_API int32_t mflex_cuda_bias_dropout_add(const void* x, const void* bias, const void* residual,
                                              const int64_t* tokens, uint64_t site, int64_t rows,
                                              int64_t columns, uint32_t threshold, float scale,
                                              int32_t dtype, void* out, int64_t stream) {
  using namespace mflex;
  if (rows == 0 || columns == 0) return cudaSuccess;
  if (dtype == 0) {
    launch(bias_dropout_add_of<float>(x, bias, residual, tokens, site, rows, columns, threshold,
                                      scale, out),
           stream);
  } else {
    launch(bias_dropout_add_of<BFloat16>(x, bias, residual, tokens, site, rows, columns, threshold,
                                         scale, out),
           stream);
  }
  return cudaGetLastError();
}
