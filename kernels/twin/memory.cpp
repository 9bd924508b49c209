#include "memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "layout.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mflex::twin {
namespace {

constexpr uint64_t kUnlimited = ~uint64_t{0};

// The number in a file of one number; kUnlimited for "max" and for a file that is not there.
uint64_t read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : kUnlimited;
}

// The number after `key` in a file of lines "key number".
uint64_t read_key(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return 0;
}

struct Names {
  const char *limit, *usage, *reclaimable;
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file"};

// Looks at `path` below `mount` and at all its ancestors.
void look_at_cgroup(const std::string& mount, std::string path, const Names& names,
                    Available& least) {
  for (;;) {
    const std::string group = mount + path;
    const uint64_t limit = read_number(group + "/" + names.limit);
    const uint64_t usage = read_number(group + "/" + names.usage);
    // Version 1 has a huge number where version 2 says "max".
    if (limit < (uint64_t{1} << 60) && usage != kUnlimited) {
      const uint64_t cache = read_key(group + "/memory.stat", names.reclaimable);
      const uint64_t used = usage - std::min(usage, cache);
      const uint64_t left = limit - std::min(limit, used);
      if (left < least.bytes) least = {left, "in the cgroup " + (path.empty() ? "/" : path)};
    }
    if (path.empty()) return;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

Available available_memory(const std::string& root) {
  Available least{read_key(root + "/proc/meminfo", "MemAvailable:") * 1024,
                  "on this machine (MemAvailable)"};
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    while (!path.empty() && path.back() == '/') path.pop_back();
    // In a container the path may be that outside of it: what is mounted is then its own group.
    if (controllers == ",,") {
      look_at_cgroup(root + "/sys/fs/cgroup", path, kVersion2, least);
      look_at_cgroup(root + "/sys/fs/cgroup", "", kVersion2, least);
    } else if (controllers.find(",memory,") != std::string::npos) {
      look_at_cgroup(root + "/sys/fs/cgroup/memory", path, kVersion1, least);
      look_at_cgroup(root + "/sys/fs/cgroup/memory", "", kVersion1, least);
    }
  }
  return least;
}

Arena make_arena(uint64_t bytes) {
  const int descriptor = memfd_create("megatron-flex-twin", MFD_CLOEXEC);
  const auto fail = [&](const char* what) {
    throw std::runtime_error(std::string(what) + " for " + std::to_string(bytes) +
                             " bytes failed: " + strerror(errno));
  };
  if (descriptor < 0) fail("memfd_create");
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) fail("ftruncate");
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) fail("mmap");
  char* base = static_cast<char*>(mapped);
  madvise(base, bytes, MADV_HUGEPAGE);  // where the kernel is set to allow it
  // The pages are zeroed by several threads: one alone brings 4 GB a second.
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const uint64_t parts = std::min<uint64_t>({cores, 16, bytes / (64 << 20) + 1});
  const uint64_t share = round_up(bytes / parts + 1, 2 << 20);
  std::vector<std::thread> threads;
  std::vector<int> errors(parts);
  for (uint64_t p = 0; p < parts; ++p) {
    threads.emplace_back([&, p] {
      const uint64_t begin = std::min(bytes, p * share), end = std::min(bytes, begin + share);
      if (begin == end || madvise(base + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
      errors[p] = errno;
      if (errno != EINVAL) return;
      errors[p] = 0;  // before Linux 5.14
      for (uint64_t at = begin; at < end; at += kPage) base[at] = 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int error : errors) {
    errno = error;
    if (error != 0) fail("taking memory");
  }
  return {descriptor, base, bytes};
}

}  // namespace mflex::twin
