// Cross entropy of float32 logits [rows, columns]: the forward pass reads them, the backward pass
// turns them into their gradient in place. Nothing else of their size is allocated.
#include <cmath>

#include "api.h"
#include "level.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

#define MFLEX_BODY "cross_entropy_kernel.inl"
#include "levels.inl"

int64_t grain(int64_t columns) {
  return kGrain / (columns > 0 ? columns : 1) + 1;
}

}  // namespace
}  // namespace mflex

// normalizer[r] = log(sum over c of exp(logits[r, c])).
MFLEX_API void mflex_log_normalizers(const float* logits, int64_t rows, int64_t columns,
                                     float* normalizer, int32_t threads) {
  using namespace mflex;
  const auto function = MFLEX_PICK(normalizers);
  parallel_for(rows, grain(columns), threads, [&](int64_t begin, int64_t end) {
    function(logits, begin, end, columns, normalizer);
  });
}

// logits[r, c] = grad[r] * (exp(logits[r, c] - normalizer[r]) - (c == labels[r])).
MFLEX_API void mflex_cross_entropy_gradients(float* logits, const int64_t* labels,
                                             const float* normalizer, const float* grad,
                                             int64_t rows, int64_t columns, int32_t threads) {
  using namespace mflex;
  const auto function = MFLEX_PICK(gradients);
  parallel_for(rows, grain(columns), threads, [&](int64_t begin, int64_t end) {
    function(logits, labels, normalizer, grad, begin, end, columns);
  });
}
