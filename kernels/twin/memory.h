// Memory of the machine: how much may be taken, and taking it.
#pragma once

#include <cstdint>
#include <string>

namespace mflex::twin {

struct Available {
  uint64_t bytes;
  std::string where;  // "on this machine (MemAvailable)" or "in the cgroup <path>"
};

// The least of what the machine and the memory cgroups of this process (versions 1 and 2, all
// ancestors) have left. `root` is put before /proc and /sys.
Available available_memory(const std::string& root);

// A memfd of `bytes` (a multiple of the page size) whose pages are all there, mapped.
// Throws std::runtime_error.
struct Arena {
  int descriptor;
  char* base;
  uint64_t bytes;
};
Arena make_arena(uint64_t bytes);

}  // namespace mflex::twin
