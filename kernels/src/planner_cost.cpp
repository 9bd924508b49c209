// The cost of one device group on prefix sums. See planner_problem.h.
#include <algorithm>
#include <cmath>

#include "planner_problem.h"

namespace mflex {

namespace {
constexpr double kRounding = 1e-9;  // an exact integer must not be rounded up
}

RangeMax::RangeMax(const double* values, int64_t count, double sign) : sign_(sign) {
  levels_.emplace_back(count);
  for (int64_t i = 0; i < count; ++i) levels_[0][i] = sign * values[i];
  for (int64_t width = 1; 2 * width <= count; width *= 2) {
    const std::vector<double>& below = levels_.back();
    std::vector<double> level(count - 2 * width + 1);
    for (size_t i = 0; i < level.size(); ++i) level[i] = std::max(below[i], below[i + width]);
    levels_.push_back(std::move(level));
  }
}

double RangeMax::operator()(int64_t begin, int64_t end) const {
  const int level = 63 - __builtin_clzll(static_cast<uint64_t>(end - begin));
  const std::vector<double>& row = levels_[level];
  return sign_ * std::max(row[begin], row[end - (int64_t{1} << level)]);
}

GroupModel::GroupModel(const mflex_planner_problem& problem, double extra_budget)
    : p_(problem),
      extra_budget_(extra_budget),
      reduce_(problem.reduce_step, problem.steps, 1.0),
      transient_(problem.transient_step, problem.steps, 1.0),
      budget_(problem.budget, problem.devices, -1.0),
      class_end_(problem.devices),
      straight_(std::is_sorted(problem.front, problem.front + problem.steps + 1) &&
                problem.front[problem.steps] == problem.steps) {
  for (int64_t d = problem.devices - 1; d >= 0; --d) {
    const bool same =
        p_.classes > 0 && d + 1 < problem.devices && p_.device_class[d] == p_.device_class[d + 1];
    class_end_[d] = same ? class_end_[d + 1] : d + 1;
  }
}

int64_t GroupModel::in_flight(int64_t unit, int64_t degree) const {
  const double needed =
      p_.remaining[unit] * static_cast<double>(p_.devices) / static_cast<double>(degree);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(needed - kRounding))) +
         p_.extra_in_flight;
}

double GroupModel::top(int64_t degree, int64_t count) const {
  const int64_t offset = p_.top_offset[degree];
  return p_.top_tokens[offset + std::min(count, p_.top_offset[degree + 1] - offset - 1)];
}

double GroupModel::wait(const Group& g) const {
  if (straight_) {
    double seconds = p_.first_forward[g.begin] + p_.round_trip[g.end];
    if (g.begin > 0) seconds += inner_hop(g) ? p_.hop_intra : p_.hop_inter;
    return seconds;
  }
  const int64_t begin = p_.front[g.begin], middle = p_.back[g.end];
  const bool has_front = p_.front[g.end] > begin, has_back = p_.back[g.begin] > middle;
  const int64_t entry = has_front ? begin : middle;
  double seconds = p_.first_forward[entry];
  if (has_front && has_back) {
    const int64_t degree = g.last - g.first;
    const double forward = p_.front_forward_prefix[g.end] - p_.front_forward_prefix[g.begin];
    const double mean = forward / static_cast<double>(p_.micro_batches);
    const double fill =
        std::min(p_.share[degree] * forward, static_cast<double>(in_flight(begin, degree)) * mean);
    seconds = std::max(seconds, p_.first_forward[middle] - fill);
  }
  seconds += p_.round_trip[has_back ? p_.back[g.begin] : p_.front[g.end]];
  if (entry > 0) seconds += inner_hop(g) ? p_.hop_intra : p_.hop_inter;
  return seconds;
}

double GroupModel::work(const Group& g) const {
  double total = p_.work_prefix[g.end] - p_.work_prefix[g.begin];
  const int64_t begin = p_.front[g.begin];
  const int64_t entry = p_.front[g.end] > begin ? begin : p_.back[g.end];
  if (entry > 0) total += inner_hop(g) ? p_.hop_busy_intra : p_.hop_busy_inter;
  return p_.share[g.last - g.first] * total;
}

double GroupModel::tail(const Group& g) const {
  const int64_t begin = p_.front[g.begin];
  const int64_t entry = p_.front[g.end] > begin ? begin : p_.back[g.end];
  double seconds = p_.drain[entry];
  const auto degree = static_cast<double>((g.last - g.first) * p_.width);
  if (degree > 1) {
    const bool inner = one_server(g.first, g.last);
    const double turns = 2.0 * (degree - 1.0);
    const double per_byte =
        turns / degree * (inner ? p_.intra_seconds_per_byte : p_.inter_seconds_per_byte);
    const double latency = turns * (inner ? p_.intra_latency : p_.inter_latency);
    double bytes = p_.reduce_prefix[g.end] - p_.reduce_prefix[g.begin];
    if (tied(g)) bytes -= p_.tied_reduce;
    const double hidden = p_.hide_prefix[g.end] - p_.hide_prefix[g.begin];
    const double largest = per_byte * reduce_(g.begin, g.end) + latency;
    seconds = std::max({seconds, largest, per_byte * bytes + latency - hidden});
  }
  return seconds;
}

double GroupModel::late(const Group& g) const {
  if (p_.classes == 0) return 0.0;
  double worst = 0.0;
  const int64_t stride = p_.steps + 1;
  for (int64_t device = g.first; device < g.last; device = class_end_[device]) {
    const int64_t row = p_.device_class[device];
    const double* bytes_prefix = p_.fetch_bytes + row * stride;
    const double* seconds_prefix = p_.fetch_seconds + row * stride;
    const double* handover_prefix = p_.handover_seconds + row * stride;
    const double bytes = bytes_prefix[g.end] - bytes_prefix[g.begin];
    if (bytes <= 0.0) continue;
    const double seconds = seconds_prefix[g.end] - seconds_prefix[g.begin];
    const double early = std::min(1.0, p_.spare[row] / bytes);
    const double handover = handover_prefix[g.end] - handover_prefix[g.begin];
    worst = std::max(worst, std::max(0.0, early * seconds - p_.hide) + (1.0 - early) * handover);
  }
  return worst;
}

double GroupModel::bytes(const Group& g) const {
  const int64_t degree = g.last - g.first;
  double state = p_.state_prefix[g.end] - p_.state_prefix[g.begin];
  double optimizer = p_.optimizer_prefix[g.end] - p_.optimizer_prefix[g.begin];
  if (tied(g)) {
    state -= p_.tied_state;
    optimizer -= p_.tied_optimizer;
  }
  if (p_.sharded) optimizer /= static_cast<double>(degree);
  double held = 0.0;
  if (p_.front[g.end] > p_.front[g.begin]) {
    held += (p_.front_activation_prefix[g.end] - p_.front_activation_prefix[g.begin]) *
            top(degree, in_flight(p_.front[g.begin], degree));
  }
  if (p_.back[g.begin] > p_.back[g.end]) {
    held += (p_.back_activation_prefix[g.end] - p_.back_activation_prefix[g.begin]) *
            top(degree, in_flight(p_.back[g.end], degree));
  }
  return state + optimizer + held + p_.buffers + transient_(g.begin, g.end) * p_.max_tokens;
}

void GroupModel::add_savings(int64_t kind, double count, int64_t entry, int64_t degree,
                             std::vector<Saving>* savings) const {
  const double share = p_.share[degree];
  const int64_t cap = in_flight(entry, degree);
  const double tokens = top(degree, cap);
  // What is split over replicas stays on the devices.
  if (p_.offload_optimizer > 0.0 && !(p_.sharded && degree > 1)) {
    const double size = count * p_.kind_optimizer[kind];
    if (size > 0.0) savings->push_back({size, 2.0 * size * p_.host_seconds_per_byte});
  }
  // Recompute or offload the activations: the lower convex hull of the two points.
  Saving points[2];
  int number = 0;
  const double kept = p_.kind_kept[kind];
  if (kept >= 0.0) {
    points[number++] = {count * (p_.kind_activation[kind] - kept) * tokens,
                        count * p_.kind_forward[kind] * share};
  }
  if (p_.offload_activations > 0.0) {
    const double per_token = count * p_.kind_activation[kind];
    const double away = tokens - top(degree, std::min<int64_t>(cap, 2));
    points[number++] = {per_token * away,
                        2.0 * per_token * p_.total_tokens * share * p_.host_seconds_per_byte};
  }
  if (number == 2) {
    if (points[0].bytes > points[1].bytes) std::swap(points[0], points[1]);
    const Saving small = points[0], large = points[1];
    const Saving step{large.bytes - small.bytes, large.seconds - small.seconds};
    if (step.seconds <= 0.0 || small.bytes <= 0.0) {
      points[0] = large;  // more bytes for no more time
      number = 1;
    } else if (step.bytes <= 0.0) {
      number = 1;  // the same bytes for more time
    } else if (small.seconds * step.bytes < step.seconds * small.bytes) {
      points[1] = step;
    } else {
      points[0] = large;  // the smaller one is above the line to the larger
      number = 1;
    }
  }
  // What saves nothing has no price, and no place in the order of prices.
  for (int i = 0; i < number; ++i) {
    if (points[i].bytes > 0.0) savings->push_back(points[i]);
  }
}

double GroupModel::cheapest(std::vector<Saving>* savings, double excess) {
  std::sort(savings->begin(), savings->end(), [](const Saving& a, const Saving& b) {
    return a.seconds * b.bytes < b.seconds * a.bytes;
  });
  double seconds = 0.0;
  for (const Saving& saving : *savings) {
    if (saving.bytes >= excess) return seconds + saving.seconds * (excess / saving.bytes);
    seconds += saving.seconds;
    excess -= saving.bytes;
  }
  return kInfinity;
}

double GroupModel::optimisation(const Group& g, double excess) const {
  thread_local std::vector<Saving> savings;
  savings.clear();
  const int64_t degree = g.last - g.first, stride = p_.steps + 1;
  for (int side = 0; side < 2; ++side) {
    const double* counts = side == 0 ? p_.front_count_prefix : p_.back_count_prefix;
    const int64_t entry = side == 0 ? p_.front[g.begin] : p_.back[g.end];
    for (int64_t kind = 0; kind < p_.kinds; ++kind) {
      const double count = counts[kind * stride + g.end] - counts[kind * stride + g.begin];
      if (count > 0.0) add_savings(kind, count, entry, degree, &savings);
    }
  }
  return cheapest(&savings, excess);
}

double GroupModel::update(const Group& g) const {
  double seconds = p_.update_prefix[g.end] - p_.update_prefix[g.begin];
  if (tied(g)) seconds -= p_.tied_update;
  return p_.sharded ? seconds / static_cast<double>(g.last - g.first) : seconds;
}

double GroupModel::operator()(const Group& g, double limit, double update_limit) const {
  double cost = wait(g) + work(g);
  if (cost > limit) return cost;
  if (update(g) > update_limit) return kInfinity;
  cost += tail(g);
  if (cost > limit) return cost;
  const double excess = bytes(g) - (budget_(g.first, g.last) + extra_budget_);
  cost += late(g);
  if (excess > 0.0) cost += optimisation(g, excess);
  return cost;
}

}  // namespace mflex
