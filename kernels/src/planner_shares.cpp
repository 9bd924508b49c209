// How the micro-batches are dealt to the replicas of a stage, for every data-parallel degree: the
// same rule as megatron_flex/schedule/routing.py (longest first to the least loaded replica).
#include <algorithm>
#include <numeric>
#include <vector>

#include "api.h"

namespace {

struct Replica {
  double load;
  int64_t count, index;
  bool operator<(const Replica& other) const {
    if (load != other.load) return load < other.load;
    if (count != other.count) return count < other.count;
    return index < other.index;
  }
};

// Puts the changed root of a binary heap (least first) in its place.
void sift_down(std::vector<Replica>& heap) {
  const Replica moved = heap[0];
  const size_t size = heap.size();
  size_t hole = 0;
  while (true) {
    size_t child = 2 * hole + 1;
    if (child >= size) break;
    if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
    if (!(heap[child] < moved)) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = moved;
}

// Inserts into `size` values in descending order, dropping the least.
void insert(double* values, int64_t size, double value) {
  int64_t at = size;
  while (at > 0 && values[at - 1] < value) --at;
  if (at == size) return;
  std::copy_backward(values + at, values + size - 1, values + size);
  values[at] = value;
}

}  // namespace

// For each degree d that is a multiple of `granule`, up to `devices`:
//   share[d]: work of the busiest replica as a part of all work;
//   top[offset[d] + k]: the most tokens in k micro-batches of one replica, k = 0 .. the end of the
//   row, which is at most devices / d + 3 entries long: more are never in flight.
// `offset` has devices + 2 entries; `top` has room for all rows. Returns the entries used.
MFLEX_API int64_t mflex_planner_shares(const double* work, const double* tokens, int64_t count,
                                       int64_t devices, int64_t granule, double* share,
                                       int64_t* offset, double* top) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  const double total = std::accumulate(work, work + count, 0.0);
  std::vector<Replica> heap;
  std::vector<double> largest;  // [replica][entries], descending
  int64_t used = 0;
  share[0] = 0.0;
  offset[0] = 0;
  for (int64_t degree = 1; degree <= devices; ++degree) {
    offset[degree] = used;
    share[degree] = 1.0;
    if (degree % granule != 0) continue;
    const int64_t parts = std::min(degree, count);
    const int64_t entries = std::min(count, (devices + degree - 1) / degree + 2);
    heap.clear();
    for (int64_t part = 0; part < parts; ++part) heap.push_back({0.0, 0, part});
    largest.assign(parts * entries, 0.0);
    for (const int64_t m : order) {
      Replica& replica = heap.front();
      insert(&largest[replica.index * entries], entries, tokens[m]);
      replica.load += work[m];
      ++replica.count;
      sift_down(heap);
    }
    const double busiest = std::max_element(heap.begin(), heap.end(), [](auto& a, auto& b) {
                             return a.load < b.load;
                           })->load;
    share[degree] = total > 0.0 ? busiest / total : 1.0 / static_cast<double>(parts);
    double* row = top + used;
    std::fill(row, row + entries + 1, 0.0);
    for (int64_t part = 0; part < parts; ++part) {
      double sum = 0.0;
      for (int64_t k = 1; k <= entries; ++k) {
        sum += largest[part * entries + k - 1];
        row[k] = std::max(row[k], sum);
      }
    }
    used += entries + 1;
  }
  offset[devices + 1] = used;
  return used;
}
