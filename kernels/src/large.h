// Vectors of problems that no cache holds: in huge pages, where the system gives them, since with
// small ones most of the time goes into finding the pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace mflex {

template <class T>
struct LargePages {
  using value_type = T;
  static constexpr size_t kPage = 2 << 20;

  LargePages() = default;
  template <class U>
  LargePages(const LargePages<U>&) {}

  T* allocate(size_t count) {
    size_t bytes = count * sizeof(T);
    const bool large = bytes >= 2 * kPage;
    if (large) bytes = (bytes + kPage - 1) / kPage * kPage;
    void* found = large ? std::aligned_alloc(kPage, bytes) : std::malloc(bytes);
    if (!found) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (large) madvise(found, bytes, MADV_HUGEPAGE);  // where it cannot be, small pages do
#endif
    return static_cast<T*>(found);
  }
  void deallocate(T* found, size_t) { std::free(found); }

  bool operator==(const LargePages&) const { return true; }
  bool operator!=(const LargePages&) const { return false; }
};

template <class T>
using LargeVector = std::vector<T, LargePages<T>>;

}  // namespace mflex
