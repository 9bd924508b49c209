// Bias, keyed dropout and residual in one pass over memory; the backward pass is the same function
// without bias and residual. No mask is stored.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "api.h"
#include "dropout_hash.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

template <typename T, bool kBias, bool kResidual>
MFLEX_INLINE void rows(const T* x, const T* bias, const T* residual, const int64_t* tokens,
                       uint64_t site, int64_t begin, int64_t end, int64_t columns,
                       uint32_t threshold, float scale, T* out) {
  for (int64_t row = begin; row < end; ++row) {
    const RowKey key = row_key(tokens[row], site);
    const T* source = x + row * columns;
    const T* base = residual + (kResidual ? row * columns : 0);
    T* target = out + row * columns;
    // out may be x itself: each element is read before it is written.
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c) {
      bias_dropout_add_element<T, kBias, kResidual>(source, bias, base, target, c, key, threshold,
                                                    scale);
    }
  }
}

#define MFLEX_ROWS(NAME, T, BIAS, RESIDUAL)                                                     \
  MFLEX_CLONES void NAME(const T* x, const T* bias, const T* residual, const int64_t* tokens,   \
                         uint64_t site, int64_t begin, int64_t end, int64_t columns,            \
                         uint32_t threshold, float scale, T* out) {                             \
    rows<T, BIAS, RESIDUAL>(x, bias, residual, tokens, site, begin, end, columns, threshold,    \
                            scale, out);                                                        \
  }
MFLEX_ROWS(rows_f32, float, false, false)
MFLEX_ROWS(rows_f32_bias, float, true, false)
MFLEX_ROWS(rows_f32_residual, float, false, true)
MFLEX_ROWS(rows_f32_both, float, true, true)
MFLEX_ROWS(rows_bf16, BFloat16, false, false)
MFLEX_ROWS(rows_bf16_bias, BFloat16, true, false)
MFLEX_ROWS(rows_bf16_residual, BFloat16, false, true)
MFLEX_ROWS(rows_bf16_both, BFloat16, true, true)
#undef MFLEX_ROWS

template <typename T, typename F>
void run(F function, const void* x, const void* bias, const void* residual, const int64_t* tokens,
         uint64_t site, int64_t count, int64_t columns, uint32_t threshold, float scale, void* out,
         int threads) {
  const int64_t grain = kGrain / (columns > 0 ? columns : 1) + 1;
  parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    function(static_cast<const T*>(x), static_cast<const T*>(bias),
             static_cast<const T*>(residual), tokens, site, begin, end, columns, threshold, scale,
             static_cast<T*>(out));
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
    auto* function = bias != nullptr ? (residual != nullptr ? rows_f32_both : rows_f32_bias)
                                     : (residual != nullptr ? rows_f32_residual : rows_f32);
    run<float>(function, x, bias, residual, tokens, site, rows, columns, threshold, scale, out,
               threads);
  } else {
    auto* function = bias != nullptr ? (residual != nullptr ? rows_bf16_both : rows_bf16_bias)
                                     : (residual != nullptr ? rows_bf16_residual : rows_bf16);
    run<BFloat16>(function, x, bias, residual, tokens, site, rows, columns, threshold, scale, out,
                  threads);
  }
}
