// A pool of native threads for the CPU forms of the kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace mflex {

// Calls body(begin, end) on ranges that cover [0, count), on at most `threads` threads, the
// caller's among them, and returns when all are done. Ranges are a multiple of `grain` but the
// last. `threads` <= 0 stands for the number of cores this process may use. Calls from several
// threads at once are correct: while the pool is busy the caller does all the work itself.
void parallel_for(int64_t count, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body);

// Cores that this process may use (its affinity mask), at least 1.
int available_threads();

}  // namespace mflex
