// Bias, keyed dropout and residual in one pass over memory; the backward pass is the same function
// without bias and residual. No mask is stored.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-trapping-math")
#endif

#include "api.h"
#include "dropout_hash.h"
#include "level.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

template <typename T, bool kBias, bool kResidual>
MFLEX_INLINE void rows(const BiasDropoutAdd<T>& a, int64_t begin, int64_t end) {
  const T* bias = a.bias;
  const int64_t columns = a.columns;
  const uint32_t threshold = a.threshold;
  const float scale = a.scale;
  for (int64_t row = begin; row < end; ++row) {
    const RowKey key = row_key(a.tokens[row], a.site);
    const T* x = a.x + row * columns;
    const T* residual = kResidual ? a.residual + row * columns : x;
    T* out = a.out + row * columns;
    // out may be x itself: each element is read before it is written.
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c) {
      bias_dropout_add_element<T, kBias, kResidual>(x[c], kBias ? bias[c] : x[c], residual[c],
                                                    out[c], c, key, threshold, scale);
    }
  }
}

template <typename T>
void run(const BiasDropoutAdd<T>& a, int threads) {
  const auto plain = a.residual != nullptr ? AtLevels<rows<T, false, true>>::pick()
                                           : AtLevels<rows<T, false, false>>::pick();
  const auto biased = a.residual != nullptr ? AtLevels<rows<T, true, true>>::pick()
                                            : AtLevels<rows<T, true, false>>::pick();
  const auto function = a.bias != nullptr ? biased : plain;
  const int64_t grain = kGrain / (a.columns > 0 ? a.columns : 1) + 1;
  parallel_for(a.rows, grain, threads,
               [&](int64_t begin, int64_t end) { function(a, begin, end); });
}

// As CUDA runs it, one thread after the other.
template <typename T>
void run_lanes(const BiasDropoutAdd<T>& a, int64_t blocks, int64_t threads) {
  with_flags(a, [&](auto bias, auto residual, auto width) {
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t thread = 0; thread < threads; ++thread)
        bias_dropout_add_lane<T, decltype(bias)::value, decltype(residual)::value,
                              decltype(width)::value>(a, block, blocks, thread, threads);
  });
}

}  // namespace
}  // namespace mflex

// out[r, c] = residual[r, c] + (keep ? (x[r, c] + bias[c]) * scale : 0), all contiguous, of type
// float32 (dtype 0) or bfloat16 (dtype 1). bias and residual may be null; out may be x or residual.
// tokens: [rows] key of each row; site: the key of the place in the model.
MFLEX_API void mflex_bias_dropout_add(const void* x, const void* bias, const void* residual,
                                      const int64_t* tokens, uint64_t site, int64_t rows,
                                      int64_t columns, uint32_t threshold, float scale,
                                      int32_t dtype, void* out, int32_t threads) {
  using namespace mflex;
  if (dtype == 0) {
    run(bias_dropout_add_of<float>(x, bias, residual, tokens, site, rows, columns, threshold, scale,
                                   out),
        threads);
  } else {
    run(bias_dropout_add_of<BFloat16>(x, bias, residual, tokens, site, rows, columns, threshold,
                                      scale, out),
        threads);
  }
}

// The same through the CUDA kernel's indexing, for a grid of `blocks` blocks of `threads` threads.
MFLEX_API void mflex_bias_dropout_add_by_lanes(const void* x, const void* bias,
                                               const void* residual, const int64_t* tokens,
                                               uint64_t site, int64_t rows, int64_t columns,
                                               uint32_t threshold, float scale, int32_t dtype,
                                               void* out, int64_t blocks, int64_t threads) {
  using namespace mflex;
  if (dtype == 0) {
    run_lanes(bias_dropout_add_of<float>(x, bias, residual, tokens, site, rows, columns, threshold,
                                         scale, out),
              blocks, threads);
  } else {
    run_lanes(bias_dropout_add_of<BFloat16>(x, bias, residual, tokens, site, rows, columns,
                                            threshold, scale, out),
              blocks, threads);
  }
}
