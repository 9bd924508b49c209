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

// The micro-batches of one degree.
class Dealing {
 public:
  Dealing(int64_t parts, int64_t entries)
      : parts_(parts),
        entries_(entries),
        load_(parts, 0.0),
        held_(parts, 0),
        largest_(parts * entries, 0.0),
        least_(parts) {}

  // The i-th largest micro-batch goes to the least loaded replica. The first ones find empty
  // replicas, in turn.
  void take(int64_t i, double work, double tokens) {
    const int64_t part = i < parts_ ? i : least_.least();
    insert(&largest_[part * entries_], held_[part]++, entries_, tokens);
    load_[part] += work;
    const Key key = key_of(load_[part], held_[part], part);
    if (i >= parts_) {
      least_.change(part, key);
      return;
    }
    least_.place(part, key);
    if (i + 1 == parts_) least_.play_all();
  }

  double busiest() const { return *std::max_element(load_.begin(), load_.end()); }

  // row[k], for k = 0 .. entries: the most tokens in k micro-batches of one replica.
  void most_tokens(double* row) const {
    std::fill(row, row + entries_ + 1, 0.0);
    for (int64_t part = 0; part < parts_; ++part) {
      double sum = 0.0;
      for (int64_t k = 1; k <= entries_; ++k) {
        sum += largest_[part * entries_ + k - 1];
        row[k] = std::max(row[k], sum);
      }
    }
  }

  int64_t parts() const { return parts_; }
  int64_t entries() const { return entries_; }

 private:
  int64_t parts_, entries_;
  std::vector<double> load_;
  std::vector<int64_t> held_;
  std::vector<double> largest_;  // [replica][entries], descending
  Tournament least_;
};

// Degrees that are dealt side by side: each step waits for the one before it of the same degree,
// so that a processor can work on several.
constexpr int64_t kTogether = 4;

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
  int64_t used = 0;
  share[0] = 0.0;
  std::fill(share + 1, share + devices + 1, 1.0);
  offset[0] = 0;
  std::vector<Dealing> dealings;
  int64_t next = 1;  // the first degree without an offset
  for (int64_t first = granule; first <= devices; first += kTogether * granule) {
    const int64_t last = std::min(devices, first + (kTogether - 1) * granule);
    dealings.clear();
    for (int64_t degree = first; degree <= last; degree += granule) {
      const int64_t entries = depth * ((devices + degree - 1) / degree) + 2;
      dealings.emplace_back(std::min(degree, count), std::min(count, entries));
    }
    for (int64_t i = 0; i < count; ++i) {
      for (Dealing& dealing : dealings) dealing.take(i, work[order[i]], tokens[order[i]]);
    }
    int64_t degree = first;
    for (const Dealing& dealing : dealings) {
      share[degree] =
          total > 0.0 ? dealing.busiest() / total : 1.0 / static_cast<double>(dealing.parts());
      dealing.most_tokens(top + used);
      while (next <= degree) offset[next++] = used;
      used += dealing.entries() + 1;
      degree += granule;
    }
  }
  while (next <= devices + 1) offset[next++] = used;
  return used;
}
