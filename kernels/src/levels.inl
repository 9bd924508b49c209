// Includes the file MFLEX_BODY once for each instruction set, inside the namespaces v4, v3
// (x86-64-v4 and -v3) and baseline, and after vector.inl. Each body defines its functions anew,
// with the vectors of that level:
//   MFLEX_LANES        floats in a vector
//   MFLEX_TILE_ROWS    rows of a register tile in matrix products, two vectors wide
// MFLEX_PICK(function) gives the function of the level in use (level.h).

#if !defined(MFLEX_X86_LEVELS)
#error "include level.h first"
#endif

#if MFLEX_X86_LEVELS
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

#define MFLEX_PICK(function) \
  (cpu_level() == kV4 ? v4::function : cpu_level() == kV3 ? v3::function : baseline::function)
#else
#define MFLEX_PICK(function) baseline::function
#endif

#define MFLEX_LANES 4
#define MFLEX_TILE_ROWS 4
namespace baseline {
#include "vector.inl"
#include MFLEX_BODY
}  // namespace baseline
