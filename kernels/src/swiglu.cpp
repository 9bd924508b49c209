// SwiGLU in one pass over memory, forward and backward.
#include <cmath>

#include "api.h"
#include "floats.h"
#include "level.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 1 << 13;  // elements that are worth a thread

#define MFLEX_BODY "swiglu_kernel.inl"
#include "levels.inl"

}  // namespace
}  // namespace mflex

// x: [rows, 2 * columns], the gate's half before the other. grad null: out [rows, columns] =
// silu(gate) * up. Else grad: [rows, columns], and out [rows, 2 * columns] is the gradient of x.
// All contiguous, float32 (dtype 0) or bfloat16 (dtype 1).
MFLEX_API void mflex_swiglu(const void* x, const void* grad, int64_t rows, int64_t columns,
                            int32_t dtype, void* out, int32_t threads) {
  using namespace mflex;
  const auto function = MFLEX_PICK(swiglu);
  const int64_t grain = kGrain / (columns > 0 ? columns : 1) + 1;
  parallel_for(rows, grain, threads, [&](int64_t begin, int64_t end) {
    function(x, grad, begin, end, columns, dtype, out);
  });
}
