// How the micro-batches are dealt to the replicas of a stage, for every data-parallel degree: the
// same rule as megatron_flex/schedule/routing.py (longest first to the least loaded replica).
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "api.h"

namespace {

__extension__ typedef unsigned __int128 Key;

// Orders replicas by load (not negative: its bits grow with it), then count, then index.
Key key_of(double load, int64_t count, int64_t index) {
  uint64_t bits;
  std::memcpy(&bits, &load, sizeof bits);
  return static_cast<Key>(bits) << 64 | static_cast<uint64_t>(count << 32 | index);
}

// The least of some keys, as a tournament: changing one replays only the matches on its way up, and
// who was played there is known beforehand. That makes it faster than a heap.
class Tournament {
 public:
  explicit Tournament(int64_t size) : leaves_(1) {
    while (leaves_ < size) leaves_ *= 2;
    nodes_.assign(2 * leaves_, ~Key{0});
  }

  void place(int64_t index, Key key) { nodes_[leaves_ + index] = key; }

  void play_all() {
    for (int64_t i = leaves_ - 1; i > 0; --i)
      nodes_[i] = std::min(nodes_[2 * i], nodes_[2 * i + 1]);
  }

  void change(int64_t index, Key key) {
    int64_t at = leaves_ + index;
    nodes_[at] = key;
    for (; at > 1; at /= 2) {
      const Key other = nodes_[at ^ 1];
      key = other < key ? other : key;
      nodes_[at / 2] = key;
    }
  }

  int64_t least() const { return static_cast<uint32_t>(nodes_[1]); }

 private:
  int64_t leaves_;
  std::vector<Key> nodes_;
};

// Inserts into the first `size` of `most` values in descending order; the least may fall out.
void insert(double* values, int64_t size, int64_t most, double value) {
  int64_t at = std::min(size, most);
  while (at > 0 && values[at - 1] < value) --at;
  if (at == most) return;
  std::copy_backward(values + at, values + std::min(size, most - 1),
                     values + std::min(size, most - 1) + 1);
  values[at] = value;
}

}  // namespace

// For each degree d that is a multiple of `granule`, up to `devices`:
//   share[d]: work of the busiest replica as a part of all work;
//   top[offset[d] + k]: the most tokens in k micro-batches of one replica, k = 0 .. the end of the
//   row, which is at most depth * ceil(devices / d) + 3 entries long: more are never in flight.
// `offset` has devices + 2 entries; `top` has room for all rows. Returns the entries used.
MFLEX_API int64_t mflex_planner_shares(const double* work, const double* tokens, int64_t count,
                                       int64_t devices, int64_t granule, int64_t depth,
                                       double* share, int64_t* offset, double* top) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  const double total = std::accumulate(work, work + count, 0.0);
  std::vector<double> load;
  std::vector<int64_t> held;
  std::vector<double> largest;  // [replica][entries], descending
  int64_t used = 0;
  share[0] = 0.0;
  offset[0] = 0;
  for (int64_t degree = 1; degree <= devices; ++degree) {
    offset[degree] = used;
    share[degree] = 1.0;
    if (degree % granule != 0) continue;
    const int64_t parts = std::min(degree, count);
    const int64_t entries = std::min(count, depth * ((devices + degree - 1) / degree) + 2);
    load.assign(parts, 0.0);
    held.assign(parts, 0);
    largest.assign(parts * entries, 0.0);
    Tournament least(parts);
    for (int64_t i = 0; i < count; ++i) {
      // The first ones find empty replicas, in turn.
      const int64_t m = order[i], part = i < parts ? i : least.least();
      insert(&largest[part * entries], held[part]++, entries, tokens[m]);
      load[part] += work[m];
      const Key key = key_of(load[part], held[part], part);
      if (i >= parts) {
        least.change(part, key);
        continue;
      }
      least.place(part, key);
      if (i + 1 == parts) least.play_all();
    }
    const double busiest = *std::max_element(load.begin(), load.end());
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
