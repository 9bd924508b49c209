// How the micro-batches are dealt to the replicas of a stage, for every data-parallel degree: the
// same rule as megatron_flex/schedule/routing.py (longest first to the least loaded replica).
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <vector>

#include "api.h"

// For each degree d that is a multiple of `granule`, up to `devices`:
//   share[d]: work of the busiest replica as a part of all work;
//   top[offset[d] + k]: the most tokens in k micro-batches of one replica, k = 0 .. count(d), where
//   count(d) = offset[d + 1] - offset[d] - 1 is the most micro-batches of one replica.
// `offset` has devices + 2 entries. Returns the number of entries of `top`; call with `top` null
// to learn it (share and offset are filled then).
MFLEX_API int64_t mflex_planner_shares(const double* work, const double* tokens, int64_t count,
                                       int64_t devices, int64_t granule, double* share,
                                       int64_t* offset, double* top) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  const double total = std::accumulate(work, work + count, 0.0);
  int64_t used = 0;
  share[0] = 0.0;
  offset[0] = offset[1] = 0;
  for (int64_t degree = 1; degree <= devices; ++degree) {
    offset[degree] = used;
    if (degree % granule != 0) {
      share[degree] = 1.0;
      offset[degree + 1] = used;
      continue;
    }
    using Entry = std::tuple<double, int64_t, int64_t>;  // load, micro-batches, replica
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
    const int64_t parts = std::min(degree, count);
    for (int64_t part = 0; part < parts; ++part) queue.emplace(0.0, 0, part);
    std::vector<std::vector<double>> held(parts);
    double busiest = 0.0;
    int64_t most = 0;
    for (const int64_t m : order) {
      auto [load, number, part] = queue.top();
      queue.pop();
      held[part].push_back(tokens[m]);
      load += work[m];
      busiest = std::max(busiest, load);
      most = std::max(most, number + 1);
      queue.emplace(load, number + 1, part);
    }
    share[degree] = total > 0.0 ? busiest / total : 1.0 / static_cast<double>(parts);
    if (top != nullptr) {
      double* row = top + used;
      std::fill(row, row + most + 1, 0.0);
      for (std::vector<double>& replica : held) {
        std::sort(replica.begin(), replica.end(), std::greater<>());
        double sum = 0.0;
        for (int64_t k = 1; k <= most; ++k) {
          if (k <= static_cast<int64_t>(replica.size())) sum += replica[k - 1];
          row[k] = std::max(row[k], sum);
        }
      }
    }
    used += most + 1;
    offset[degree + 1] = used;
  }
  return used;
}
