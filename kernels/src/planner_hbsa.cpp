// The paper's search (docs/planner.md): cut L layers and all D devices into exactly N stages
// within bounds, so that eq. 1, sum t + max(n - N + 1, 0) * max t, is least. The state is (stages,
// layers, devices); each keeps the pairs (sum, max) that no other pair beats in both.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "api.h"
#include "planner_problem.h"

namespace {

struct Entry {
  double sum, max;
  int32_t begin, first, parent;  // of the last stage: its first layer and device; entry before it
};

class PaperSearch {
 public:
  PaperSearch(const mflex_planner_problem& problem, int64_t stages, const int64_t* bounds,
              const double* hops)
      : p_(problem),
        stages_(stages),
        layer_low_(std::max<int64_t>(1, bounds[0])),
        layer_high_(bounds[1]),
        device_low_(std::max<int64_t>(1, bounds[2])),
        device_high_(bounds[3]),
        hops_(hops),
        fronts_((stages + 1) * (problem.steps + 1) * (problem.devices + 1)) {}

  double run(int64_t* out) {
    front(0, 0, 0).push_back({0.0, 0.0, 0, 0, -1});
    for (int64_t s = 0; s < stages_; ++s) {
      // What is left must go into the later stages.
      for (int64_t begin = 0; begin <= p_.steps; ++begin) {
        for (int64_t first = 0; first <= p_.devices; ++first) {
          if (!front(s, begin, first).empty()) extend(s, begin, first);
        }
      }
    }
    const std::vector<Entry>& last = front(stages_, p_.steps, p_.devices);
    const double factor =
        std::max<double>(0.0, static_cast<double>(p_.micro_batches - stages_ + 1));
    double best = std::numeric_limits<double>::infinity();
    int32_t chosen = -1;
    for (size_t i = 0; i < last.size(); ++i) {
      const double seconds = last[i].sum + factor * last[i].max;
      if (seconds < best) {
        best = seconds;
        chosen = static_cast<int32_t>(i);
      }
    }
    int64_t end = p_.steps, devices = p_.devices;
    for (int64_t s = stages_; s > 0 && chosen >= 0; --s) {
      const Entry& e = front(s, end, devices)[chosen];
      const int64_t row[4] = {e.begin, end, e.first, devices};
      std::copy(row, row + 4, out + 4 * (s - 1));
      end = e.begin;
      devices = e.first;
      chosen = e.parent;
    }
    return best;
  }

  double stage_seconds(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const auto n = static_cast<double>(p_.micro_batches);
    const auto degree = static_cast<double>(last - first);
    const bool inside = p_.server[first] == p_.server[last - 1];
    double seconds = (p_.work_prefix[end] - p_.work_prefix[begin]) / n;
    if (begin > 0) {
      seconds +=
          first > 0 && inside && p_.server[first - 1] == p_.server[first] ? hops_[0] : hops_[1];
    }
    seconds /= degree;
    const double ring = degree * static_cast<double>(p_.width);
    const double turns = 2.0 * (ring - 1.0);
    const double per_byte = inside ? p_.intra_seconds_per_byte : p_.inter_seconds_per_byte;
    const double latency = inside ? p_.intra_latency : p_.inter_latency;
    const double reduce = p_.reduce_prefix[end] - p_.reduce_prefix[begin];
    const double update = p_.update_prefix[end] - p_.update_prefix[begin];
    return seconds + (turns * (latency + per_byte * reduce / ring) + update) / n;
  }

 private:
  std::vector<Entry>& front(int64_t s, int64_t layers, int64_t devices) {
    return fronts_[(s * (p_.steps + 1) + layers) * (p_.devices + 1) + devices];
  }

  void extend(int64_t s, int64_t begin, int64_t first) {
    const int64_t left = stages_ - s - 1;
    for (int64_t end = begin + layer_low_; end <= std::min(p_.steps, begin + layer_high_); ++end) {
      const int64_t layers = p_.steps - end;
      if (layers < left * layer_low_ || layers > left * layer_high_) continue;
      for (int64_t last = first + device_low_; last <= std::min(p_.devices, first + device_high_);
           ++last) {
        const int64_t devices = p_.devices - last;
        if (devices < left * device_low_ || devices > left * device_high_) continue;
        const double t = stage_seconds(begin, end, first, last);
        const std::vector<Entry>& from = front(s, begin, first);
        for (size_t i = 0; i < from.size(); ++i) {
          insert(&front(s + 1, end, last),
                 {from[i].sum + t, std::max(from[i].max, t), static_cast<int32_t>(begin),
                  static_cast<int32_t>(first), static_cast<int32_t>(i)});
        }
      }
    }
  }

  static void insert(std::vector<Entry>* entries, const Entry& added) {
    for (const Entry& e : *entries) {
      if (e.sum <= added.sum && e.max <= added.max) return;
    }
    entries->erase(
        std::remove_if(entries->begin(), entries->end(),
                       [&](const Entry& e) { return added.sum <= e.sum && added.max <= e.max; }),
        entries->end());
    entries->push_back(added);
  }

  const mflex_planner_problem& p_;
  const int64_t stages_, layer_low_, layer_high_, device_low_, device_high_;
  const double* hops_;
  std::vector<std::vector<Entry>> fronts_;
};

}  // namespace

// Least eq. 1 for exactly `stages` stages on all devices; infinite when the bounds allow none.
// `bounds`: least and most layers of a stage, least and most devices. `hops`: seconds of a mean
// micro-batch's activation and gradient, within a server and between servers. Groups go to `out`
// as in mflex_planner_search.
MFLEX_API double mflex_planner_hbsa(const mflex_planner_problem* problem, int64_t stages,
                                    const int64_t* bounds, const double* hops, int64_t* out) {
  return PaperSearch(*problem, stages, bounds, hops).run(out);
}
