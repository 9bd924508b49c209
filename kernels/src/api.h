// The C interface's decoration, and the run-time dispatch over vector instruction sets.
//
// Every exported function takes raw pointers, sizes in 64-bit integers, and streams as integers;
// the Python side declares the same signatures in megatron_flex/native.py.
#pragma once

#include <cstddef>
#include <cstdint>

#define MFLEX_API extern "C" __attribute__((visibility("default")))

// A loop marked MFLEX_CLONES is compiled for the portable baseline and for newer x86-64 levels;
// the loader picks one. Helpers that it calls must be MFLEX_INLINE, or they stay at the baseline.
// Sanitizers' runtimes are not up yet when the loader picks, so their builds have the baseline
// only.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(MFLEX_SANITIZED) && \
    !defined(__CUDACC__)
#define MFLEX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MFLEX_CLONES
#endif

#if defined(__CUDACC__)
#define MFLEX_HD __host__ __device__ __forceinline__
#else
#define MFLEX_HD inline __attribute__((always_inline))
#endif
#define MFLEX_INLINE inline __attribute__((always_inline))
