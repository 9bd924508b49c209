#include "level.h"

#include <algorithm>
#include <atomic>

namespace mflex {
namespace {

int newest() {
#if MFLEX_X86_LEVELS
  if (__builtin_cpu_supports("x86-64-v4")) return kV4;
  if (__builtin_cpu_supports("x86-64-v3")) return kV3;
#endif
  return kBaseline;
}

std::atomic<int>& level() {
  static std::atomic<int> value{newest()};
  return value;
}

}  // namespace

int cpu_level() {
  return level().load(std::memory_order_relaxed);
}

}  // namespace mflex

// From now on kernels use instruction sets up to `cap`: 4, 3 or 1, see level.h; 0 changes nothing.
// Returns the level that this comes to: a processor's own may be lower.
MFLEX_API int32_t mflex_cap_level(int32_t cap) {
  if (cap != 0) mflex::level() = std::min(static_cast<int>(cap), mflex::newest());
  return mflex::cpu_level();
}
