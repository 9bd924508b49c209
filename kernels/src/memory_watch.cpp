// How much memory another library of this process has in use: PyTorch's CPU allocator keeps no
// figures, so its requests to the C library are counted.
//
// A shared library reaches posix_memalign and free through its own table of imported addresses.
// watch() puts counting functions into that table of one library, as heap profilers do. Nothing
// else of the process is touched, and only memory that was taken after that is counted.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "api.h"

namespace mflex {
namespace {

std::atomic<int64_t> current{0};
std::atomic<int64_t> most{0};

// Sizes by address, in parts with a lock each.
struct Part {
  std::mutex mutex;
  std::unordered_map<void*, size_t> sizes;
};
constexpr int kParts = 64;

Part& part_of(void* address) {
  static Part* const parts = new Part[kParts];  // outlives every caller
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return parts[(bits >> 6 ^ bits >> 12 ^ bits >> 20) % kParts];
}

int counted_memalign(void** out, size_t alignment, size_t size) {
  const int status = ::posix_memalign(out, alignment, size);
  if (status != 0) {
    return status;
  }
  {
    Part& part = part_of(*out);
    const std::lock_guard<std::mutex> lock(part.mutex);
    part.sizes[*out] = size;
  }
  const auto bytes = static_cast<int64_t>(size);
  const int64_t now = current.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t before = most.load(std::memory_order_relaxed);
  while (before < now && !most.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
  }
  return 0;
}

void counted_free(void* address) {
  if (address != nullptr) {
    Part& part = part_of(address);
    const std::lock_guard<std::mutex> lock(part.mutex);
    const auto found = part.sizes.find(address);
    if (found != part.sizes.end()) {
      current.fetch_sub(static_cast<int64_t>(found->second), std::memory_order_relaxed);
      part.sizes.erase(found);
    }
  }
  ::free(address);
}

}  // namespace
}  // namespace mflex

#if defined(__linux__) && defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace mflex {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kCallSlot = R_X86_64_JUMP_SLOT, kDataSlot = R_X86_64_GLOB_DAT;
#else
constexpr uint32_t kCallSlot = R_AARCH64_JUMP_SLOT, kDataSlot = R_AARCH64_GLOB_DAT;
#endif

struct Search {
  const char* library;
  bool found = false, taking = false, freeing = false;
};

bool write_slot(uintptr_t slot, void* function, bool read_only) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const start = reinterpret_cast<void*>(slot / page * page);
  if (read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  __atomic_store_n(reinterpret_cast<void**>(slot), function, __ATOMIC_RELEASE);
  return !read_only || mprotect(start, page, PROT_READ) == 0;
}

// Redirects the imports in one relocation table.
void redirect(Search& search, uintptr_t base, const ElfW(Rela) * table, size_t bytes,
              const ElfW(Sym) * symbols, const char* names, uintptr_t read_only_begin,
              uintptr_t read_only_end) {
  for (size_t i = 0; i < bytes / sizeof *table; ++i) {
    const auto kind = static_cast<uint32_t>(ELF64_R_TYPE(table[i].r_info));
    if (kind != kCallSlot && kind != kDataSlot) {
      continue;
    }
    const char* const name = names + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
    const bool takes = std::strcmp(name, "posix_memalign") == 0;
    if (!takes && std::strcmp(name, "free") != 0) {
      continue;
    }
    void* const function =
        takes ? reinterpret_cast<void*>(&counted_memalign) : reinterpret_cast<void*>(&counted_free);
    const uintptr_t slot = base + table[i].r_offset;
    if (write_slot(slot, function, read_only_begin <= slot && slot < read_only_end)) {
      (takes ? search.taking : search.freeing) = true;
    }
  }
}

int visit(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  if (std::strcmp(slash == nullptr ? info->dlpi_name : slash + 1, search.library) != 0) {
    return 0;
  }
  search.found = true;
  const uintptr_t base = info->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  uintptr_t read_only_begin = 0, read_only_end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + header.p_vaddr);
    } else if (header.p_type == PT_GNU_RELRO) {
      read_only_begin = base + header.p_vaddr;
      read_only_end = read_only_begin + header.p_memsz;
    }
  }
  uintptr_t symbols = 0, names = 0, calls = 0, others = 0;
  size_t call_bytes = 0, other_bytes = 0;
  bool with_addends = false;
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        symbols = dynamic->d_un.d_ptr;
        break;
      case DT_STRTAB:
        names = dynamic->d_un.d_ptr;
        break;
      case DT_JMPREL:
        calls = dynamic->d_un.d_ptr;
        break;
      case DT_PLTRELSZ:
        call_bytes = dynamic->d_un.d_val;
        break;
      case DT_PLTREL:
        with_addends = dynamic->d_un.d_val == DT_RELA;
        break;
      case DT_RELA:
        others = dynamic->d_un.d_ptr;
        break;
      case DT_RELASZ:
        other_bytes = dynamic->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (symbols == 0 || names == 0) {
    return 1;
  }
  const auto* symbol_table = reinterpret_cast<const ElfW(Sym)*>(symbols);
  const auto* text = reinterpret_cast<const char*>(names);
  // Frees first: what is taken from then on is also seen to go.
  if (others != 0) {
    redirect(search, base, reinterpret_cast<const ElfW(Rela)*>(others), other_bytes, symbol_table,
             text, read_only_begin, read_only_end);
  }
  if (calls != 0 && with_addends) {
    redirect(search, base, reinterpret_cast<const ElfW(Rela)*>(calls), call_bytes, symbol_table,
             text, read_only_begin, read_only_end);
  }
  return 1;
}

}  // namespace
}  // namespace mflex

// Begins to count what the loaded library of this file name takes and frees. Returns 0; 1 if the
// library is not loaded or does not import both functions, 2 on systems where it cannot be done.
MFLEX_API int32_t mflex_memory_watch(const char* library) {
  mflex::Search search{library};
  dl_iterate_phdr(mflex::visit, &search);
  return search.taking && search.freeing ? 0 : 1;
}
#else
MFLEX_API int32_t mflex_memory_watch(const char*) {
  return 2;
}
#endif

// Bytes in use now.
MFLEX_API int64_t mflex_memory_current() {
  return mflex::current.load();
}

// The most bytes that were in use at once since the last call with `reset` other than 0.
MFLEX_API int64_t mflex_memory_peak(int32_t reset) {
  if (reset == 0) {
    return mflex::most.load();
  }
  const int64_t now = mflex::current.load();
  return mflex::most.exchange(now);
}
