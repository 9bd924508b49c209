// Includes the file MFLEX_BODY once for each instruction set, inside the namespaces v4, v3
// (x86-64-v4 and -v3) and baseline, and after vector.inl. Each body defines its functions anew,
// with the vectors of that level:
//   MFLEX_LANES        floats in a vector
//   MFLEX_TILE_ROWS    rows of a register tile in matrix products, two vectors wide
// MFLEX_AT_LEVEL(level, function) gives the function of a level: 4 and 3 as in x86-64-v4 and -v3, 1
// the portable baseline, 0 the newest that this processor has. It is null if the processor lacks
// it.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define MFLEX_LANES 16
#define MFLEX_TILE_ROWS 12
namespace v4 {
#include "vector.inl"
#include MFLEX_BODY
}  // namespace v4
#undef MFLEX_LANES
#undef MFLEX_TILE_ROWS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define MFLEX_LANES 8
#define MFLEX_TILE_ROWS 6
namespace v3 {
#include "vector.inl"
#include MFLEX_BODY
}  // namespace v3
#undef MFLEX_LANES
#undef MFLEX_TILE_ROWS
#pragma GCC pop_options

#define MFLEX_AT_LEVEL(level, function)                                                         \
  (((level) == 0 || (level) == 4) && __builtin_cpu_supports("x86-64-v4")   ? v4::function       \
   : ((level) == 0 || (level) == 3) && __builtin_cpu_supports("x86-64-v3") ? v3::function       \
   : (level) <= 1                                                          ? baseline::function \
                                                                           : nullptr)
#else
#define MFLEX_AT_LEVEL(level, function) ((level) <= 1 ? baseline::function : nullptr)
#endif

#define MFLEX_LANES 4
#define MFLEX_TILE_ROWS 4
namespace baseline {
#include "vector.inl"
#include MFLEX_BODY
}  // namespace baseline
