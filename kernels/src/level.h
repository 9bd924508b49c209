// Which instruction sets the kernels use: the newest that this processor has, or a lower cap.
//
// Kernels with explicit vectors are written once for each level, see levels.inl. Plain loops that
// the compiler vectorises are compiled once for each level by AtLevels.
#pragma once

#include "api.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define MFLEX_X86_LEVELS 1
#else
#define MFLEX_X86_LEVELS 0
#endif

namespace mflex {

// As in x86-64-v3 (AVX2) and -v4 (AVX-512).
enum : int { kBaseline = 1, kV3 = 3, kV4 = 4 };

// The level in use.
int cpu_level();

// `Body`, an MFLEX_INLINE function, compiled for each level. Helpers that it calls must be
// MFLEX_INLINE too, or they stay at the baseline.
template <auto Body>
struct AtLevels;

template <typename Result, typename... Arguments, Result (*Body)(Arguments...)>
struct AtLevels<Body> {
#if MFLEX_X86_LEVELS
  __attribute__((target("arch=x86-64-v4"))) static Result v4(Arguments... arguments) {
    return Body(arguments...);
  }
  __attribute__((target("arch=x86-64-v3"))) static Result v3(Arguments... arguments) {
    return Body(arguments...);
  }
#endif
  static Result baseline(Arguments... arguments) { return Body(arguments...); }

  // The function for the level in use.
  static auto pick() -> Result (*)(Arguments...) {
#if MFLEX_X86_LEVELS
    if (cpu_level() == kV4) return v4;
    if (cpu_level() == kV3) return v3;
#endif
    return baseline;
  }
};

}  // namespace mflex
