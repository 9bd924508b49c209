#include "api.h"

// 1 when the library holds the CUDA kernels.
MFLEX_API int32_t mflex_built_with_cuda() {
#if defined(MFLEX_WITH_CUDA)
  return 1;
#else
  return 0;
#endif
}
