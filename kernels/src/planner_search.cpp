// The exact bottleneck search (docs/planner.md): cut the steps over devices in their given order,
// in contiguous groups with idle devices anywhere, so that
//     max(max over groups of cost, chain) + max over groups of update
// is least.
//
// For a bound theta, reach(x) is the most steps that complete groups can cover with the first x
// devices when no group costs more than theta. Every cost grows with inclusion and falls when a
// group starts later, so a group after device y starts best at reach(y). The least feasible theta
// is found by bisection; an infeasible theta jumps to the smallest cost that it rejected, a
// feasible one to the cost of the groups that it found, so the end is exact. The update term is a
// second, discrete bound: it is lowered step by step while that can still pay.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "planner_problem.h"

namespace mflex {
namespace {

constexpr double kTolerance = 1e-11;  // relative; the tests ask for 1e-9

struct Found {
  std::vector<Group> groups;
  double cost = kInfinity;    // max(groups, chain)
  double update = kInfinity;  // max of updates
  double total() const { return cost + update; }
};

// What is known of the groups that end at a device, for at most so many groups (or for any number).
struct Reach {
  // Groups that end exactly at device x cover exact[x] steps (-1: none); the last of them begins
  // at device first[x] with step begin[x], after groups that end at device previous[x].
  std::vector<int64_t> exact, first, begin, previous;
  // The x' <= x with the largest exact[x'].
  std::vector<int64_t> best_at;
};

class Search {
 public:
  // `groups` 0: any number; otherwise at most so many.
  Search(const mflex_planner_problem& problem, int64_t groups, double extra_budget)
      : p_(problem),
        model_(problem, extra_budget),
        groups_(groups),
        rows_(groups > 0 ? groups : 1) {
    for (Reach& row : rows_) {
      const auto size = static_cast<size_t>(problem.devices + 1);
      for (auto* field : {&row.exact, &row.first, &row.begin, &row.previous, &row.best_at}) {
        field->assign(size, -1);
      }
    }
  }

  Found best() {
    Found best = bottleneck(kInfinity, kInfinity);
    if (!std::isfinite(best.cost)) return best;
    // No cut costs less; rounding must not hide one that costs the same.
    const double floor = best.cost * (1.0 + kTolerance);
    // The least update at that cost.
    const double least = least_update() * (1.0 - kTolerance);
    double low = least;
    while (next_update(best.update) > low) {
      const double middle = 0.5 * (low + best.update);
      Found probe;
      if (check(floor, middle, &probe)) {
        best = std::move(probe);
      } else {
        low = middle;
      }
    }
    // A smaller update at a higher cost: intervals of updates, each tried as a whole first with
    // its largest update and the cost that its smallest would leave.
    struct Interval {
      double low, high;  // updates in (low, high)
    };
    std::vector<Interval> open{{least, best.update}};
    while (!open.empty()) {
      const auto [above, below] = open.back();
      open.pop_back();
      const double limit = next_update(below);
      if (limit <= above) continue;
      const bool single = next_update(limit) <= above;
      const double target = best.total() * (1.0 - kTolerance) - (single ? limit : above);
      Found probe;
      if (target < floor || !check(target, limit, &probe)) continue;
      if (single) {
        Found found = bottleneck(limit, best.total());
        if (found.total() < best.total()) best = std::move(found);
        continue;
      }
      if (probe.total() < best.total()) best = std::move(probe);
      const double middle = 0.5 * (above + limit);
      open.push_back({middle, below});
      open.push_back({above, std::nextafter(middle, kInfinity)});
    }
    return best;
  }

  bool feasible() {
    Found found;
    return check(kInfinity, kInfinity, &found);
  }

 private:
  // No cut updates faster: every step is somewhere, and all of them are on so many devices.
  double least_update() const {
    const int64_t degree = p_.sharded ? p_.devices : 1;
    double least =
        model_.update({0, p_.steps, 0, degree}) / static_cast<double>(p_.sharded ? 1 : p_.devices);
    for (int64_t step = 0; step < p_.steps; ++step) {
      least = std::max(least, model_.update({step, step + 1, 0, degree}));
    }
    return least;
  }

  // Largest update of any run of steps below `limit`; negative if there is none.
  double next_update(double limit) const {
    double best = -1.0;
    limit *= 1.0 - 0.1 * kTolerance;  // sums that differ by their rounding are one value
    const int64_t degrees = p_.sharded ? std::min(p_.devices, p_.micro_batches) : 1;
    for (int64_t degree = 1; degree <= degrees; ++degree) {
      for (int64_t begin = 0; begin < p_.steps; ++begin) {
        int64_t low = begin, high = p_.steps;  // the longest run that stays below the limit
        while (low < high) {
          const int64_t middle = (low + high + 1) / 2;
          const bool below = model_.update({begin, middle, 0, degree}) < limit;
          (below ? low : high) = below ? middle : middle - 1;
        }
        if (low > begin) best = std::max(best, model_.update({begin, low, 0, degree}));
      }
    }
    return best;
  }

  // Least cost with no update above `limit`. Gives up when the total cannot be below `known`.
  Found bottleneck(double limit, double known) {
    Found best;
    const auto devices = static_cast<double>(p_.devices);
    double low = std::max(p_.work_prefix[p_.steps] / devices, p_.chain);
    double theta = low, growth = 0.01;
    bool middle = true;
    while (true) {
      Found found;
      if (check(theta, limit, &found)) {
        if (found.cost < best.cost) best = std::move(found);
      } else {
        if (!std::isfinite(rejected_)) return best;
        low = std::max(low, rejected_);
      }
      if (low >= best.cost * (1.0 - kTolerance) || low >= known) return best;
      if (std::isfinite(best.cost)) {
        // In turn the middle, and the smallest cost that was rejected.
        theta = middle ? 0.5 * (low + best.cost) : low;
        middle = !middle;
      } else {
        theta = low * (1.0 + growth);
        growth *= 2.0;
      }
    }
  }

  // Are there groups with cost <= theta and update <= limit? If not, rejected_ is a lower bound of
  // the least theta at which the answer can change.
  bool check(double theta, double limit, Found* found) {
    rejected_ = kInfinity;
    if (p_.chain > theta) {
      rejected_ = p_.chain;
      return false;
    }
    for (size_t row = 0; row < rows_.size(); ++row) {
      // Without a limit on the groups, a row feeds itself.
      const Reach* before = groups_ == 0 ? &rows_[0] : row > 0 ? &rows_[row - 1] : nullptr;
      if (fill(before, &rows_[row], theta, limit)) {
        collect(static_cast<int64_t>(row), found);
        return true;
      }
    }
    return false;
  }

  // Fills one row; true when all steps are covered (last_ is then where the last group ends).
  bool fill(const Reach* before, Reach* row, double theta, double limit) {
    const int64_t granule = p_.granule;
    row->best_at[0] = 0;
    row->exact[0] = -1;
    for (int64_t x = granule; x <= p_.devices; x += granule) {
      int64_t own = -1;
      for (int64_t y = x - granule; y >= 0 && x - y <= p_.micro_batches; y -= granule) {
        try_group({0, 0, y, x}, 0, theta, limit, row, &own);
        if (before == nullptr || y == 0) continue;
        const int64_t at = before->best_at[y];
        if (before->exact[at] > 0) {
          try_group({before->exact[at], 0, y, x}, at, theta, limit, row, &own);
        }
      }
      row->exact[x] = own;
      if (own == p_.steps) {
        last_ = x;
        return true;
      }
      const int64_t inherited = row->best_at[x - granule];
      row->best_at[x] = own > row->exact[inherited] ? x : inherited;
    }
    return false;
  }

  // Extends a group (its `end` is found here) as far as theta allows; keeps it if it goes furthest.
  void try_group(Group g, int64_t previous, double theta, double limit, Reach* row, int64_t* own) {
    const int64_t least = std::max(*own, g.begin) + 1;
    if (least > p_.steps) return;
    // Work alone is often too much: most groups are refused here.
    const double work =
        p_.share[g.last - g.first] * (p_.work_prefix[least] - p_.work_prefix[g.begin]);
    if (work > theta) {
      rejected_ = std::min(rejected_, work);
      return;
    }
    auto fits = [&](int64_t end) {
      g.end = end;
      const double cost = model_(g, theta, limit);
      if (cost <= theta && cost < kInfinity) return true;
      if (cost > theta) rejected_ = std::min(rejected_, cost);
      return false;
    };
    if (!fits(least)) return;
    int64_t good = least, bad = p_.steps + 1;
    for (int64_t stride = 1; good + stride < bad; stride *= 2) {
      if (fits(good + stride)) {
        good += stride;
      } else {
        bad = good + stride;
        break;
      }
    }
    while (bad - good > 1) {
      const int64_t middle = good + (bad - good) / 2;
      (fits(middle) ? good : bad) = middle;
    }
    *own = good;
    row->first[g.last] = g.first;
    row->begin[g.last] = g.begin;
    row->previous[g.last] = previous;
  }

  void collect(int64_t row, Found* found) const {
    found->cost = p_.chain;
    found->update = 0.0;
    int64_t x = last_;
    while (x > 0) {
      const Reach& reach = rows_[groups_ > 0 ? row-- : 0];
      const Group g{reach.begin[x], reach.exact[x], reach.first[x], x};
      const int64_t previous = reach.previous[x];
      found->cost = std::max(found->cost, model_(g, kInfinity, kInfinity));
      found->update = std::max(found->update, model_.update(g));
      found->groups.push_back(g);
      x = previous;
    }
    std::reverse(found->groups.begin(), found->groups.end());
  }

  const mflex_planner_problem& p_;
  const GroupModel model_;
  const int64_t groups_;
  std::vector<Reach> rows_;
  double rejected_ = kInfinity;
  int64_t last_ = 0;
};

}  // namespace
}  // namespace mflex

// Writes groups as four integers each (begin step, end step, first device, last device + 1) and
// returns how many; 0 when nothing fits. `cost` receives the cost and the update. `groups` 0: any
// number, otherwise at most so many.
MFLEX_API int64_t mflex_planner_search(const mflex_planner_problem* problem, int64_t groups,
                                       int64_t* out, double* cost) {
  groups = std::min({groups, problem->devices, problem->steps});
  const mflex::Found found = mflex::Search(*problem, groups, 0.0).best();
  for (size_t i = 0; i < found.groups.size(); ++i) {
    const mflex::Group& g = found.groups[i];
    const int64_t row[4] = {g.begin, g.end, g.first, g.last};
    std::copy(row, row + 4, out + 4 * i);
  }
  cost[0] = found.cost;
  cost[1] = found.update;
  return static_cast<int64_t>(found.groups.size());
}

// Is there any plan when every device has `extra_budget` more bytes?
MFLEX_API int64_t mflex_planner_feasible(const mflex_planner_problem* problem,
                                         double extra_budget) {
  return mflex::Search(*problem, 0, extra_budget).feasible() ? 1 : 0;
}
