// The C interface's decoration.
//
// Every exported function takes raw pointers, sizes in 64-bit integers, and streams as integers;
// the Python side declares the same signatures in megatron_flex/native.py.
#pragma once

#include <cstddef>
#include <cstdint>

#define MFLEX_API extern "C" __attribute__((visibility("default")))

#if defined(__CUDACC__)
#define MFLEX_HD __host__ __device__ __forceinline__
#else
#define MFLEX_HD inline __attribute__((always_inline))
#endif
#define MFLEX_INLINE inline __attribute__((always_inline))
