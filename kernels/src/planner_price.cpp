// The price of a plan of any shape: its groups may hold several chunks, in any place.
#include <algorithm>
#include <vector>

#include "api.h"
#include "planner_problem.h"

namespace mflex {

double GroupModel::fetch(int64_t device, const std::vector<Chunk>& chunks) const {
  const int64_t stride = p_.steps + 1, row = p_.device_class[device];
  double bytes = 0.0, seconds = 0.0, handover = 0.0;
  for (const Chunk& c : chunks) {
    bytes += p_.fetch_bytes[row * stride + c.end] - p_.fetch_bytes[row * stride + c.begin];
    seconds += p_.fetch_seconds[row * stride + c.end] - p_.fetch_seconds[row * stride + c.begin];
    handover +=
        p_.handover_seconds[row * stride + c.end] - p_.handover_seconds[row * stride + c.begin];
  }
  if (bytes <= 0.0) return 0.0;
  const double early = std::min(1.0, p_.spare[row] / bytes);
  return std::max(0.0, early * seconds - p_.hide) + (1.0 - early) * handover;
}

GroupCost GroupModel::parts(const std::vector<Chunk>& chunks, const int64_t* devices,
                            int64_t count) const {
  auto span = [](const double* prefix, const Chunk& c) { return prefix[c.end] - prefix[c.begin]; };
  auto together = [&](const int64_t* first, int64_t number) {
    return std::all_of(first, first + number,
                       [&](int64_t d) { return p_.server[d] == p_.server[*first]; });
  };
  const int64_t entry = chunks.front().begin, end = chunks.back().end, stride = p_.steps + 1;
  const int64_t before = *std::min_element(devices, devices + count) - 1;
  const bool inner =
      before >= 0 && together(devices, count) && p_.server[before] == p_.server[devices[0]];
  const bool both_ends = p_.tie_low >= 0 && entry == 0 && end == p_.steps;
  const double first_shards = p_.sharded ? static_cast<double>(chunks.front().degree) : 1.0;

  GroupCost cost;
  double fill = 0.0, reduced = 0.0, largest = 0.0, latency = 0.0, hidden = 0.0, transient = 0.0;
  std::vector<Saving> savings;
  if (both_ends) {
    cost.update -= p_.tied_update / first_shards;
    cost.bytes -= p_.tied_state + p_.tied_optimizer / first_shards;
  }
  for (const Chunk& c : chunks) {
    const double share = p_.share[c.degree], forward = span(p_.front_forward_prefix, c);
    const double shards = p_.sharded ? static_cast<double>(c.degree) : 1.0;
    const int64_t cap = in_flight(c.begin, c.degree);
    cost.wait = std::max(cost.wait, p_.first_forward[c.begin] - fill);
    fill += std::min(share * forward,
                     static_cast<double>(cap) * forward / static_cast<double>(p_.micro_batches));
    cost.work += share * span(p_.work_prefix, c);
    cost.update += span(p_.update_prefix, c) / shards;
    cost.bytes += span(p_.state_prefix, c) + span(p_.optimizer_prefix, c) / shards +
                  span(p_.front_activation_prefix, c) * top(c.degree, cap);
    hidden += span(p_.hide_prefix, c);
    transient = std::max(transient, transient_(c.begin, c.end));
    if (c.degree * p_.width > 1) {
      const bool inside = together(c.holders, c.degree);
      const auto ring = static_cast<double>(c.degree * p_.width);
      const double turns = 2.0 * (ring - 1.0);
      const double per_byte =
          turns / ring * (inside ? p_.intra_seconds_per_byte : p_.inter_seconds_per_byte);
      latency = std::max(latency, turns * (inside ? p_.intra_latency : p_.inter_latency));
      double bytes = span(p_.reduce_prefix, c);
      if (both_ends && c.begin == 0) bytes -= p_.tied_reduce;
      reduced += per_byte * bytes;
      largest = std::max(largest, per_byte * reduce_(c.begin, c.end));
    }
    for (int64_t kind = 0; kind < p_.kinds; ++kind) {
      const double number = p_.front_count_prefix[kind * stride + c.end] -
                            p_.front_count_prefix[kind * stride + c.begin];
      if (number > 0.0) add_savings(kind, number, c.begin, c.degree, &savings);
    }
  }
  cost.wait += p_.round_trip[end];
  if (entry > 0) {
    cost.wait += inner ? p_.hop_intra : p_.hop_inter;
    cost.work += p_.share[chunks.front().degree] * (inner ? p_.hop_busy_intra : p_.hop_busy_inter);
  }
  cost.tail = std::max({p_.drain[entry], largest + latency, reduced + latency - hidden});
  cost.bytes += p_.buffers + transient * p_.max_tokens;
  double budget = kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    budget = std::min(budget, p_.budget[devices[i]]);
    if (p_.classes > 0) cost.late = std::max(cost.late, fetch(devices[i], chunks));
  }
  cost.saved = std::max(0.0, cost.bytes - budget);
  cost.optimisation = cost.saved > 0.0 ? cheapest(&savings, cost.saved) : 0.0;
  return cost;
}

}  // namespace mflex

// Parts of every group's cost: wait, work, tail, late, optimisation, update, bytes, saved. Group g
// has chunks [chunk_offset[g], chunk_offset[g + 1]), chunk c the steps [chunks[2c], chunks[2c + 1])
// and the holders [holder_offset[c], holder_offset[c + 1]); group g's own devices are
// [device_offset[g], device_offset[g + 1]). The problem must be straight.
MFLEX_API void mflex_planner_price(const mflex_planner_problem* problem, int64_t groups,
                                   const int64_t* chunk_offset, const int64_t* chunks,
                                   const int64_t* holder_offset, const int64_t* holders,
                                   const int64_t* device_offset, const int64_t* devices,
                                   double* out) {
  const mflex::GroupModel model(*problem);
  std::vector<mflex::Chunk> held;
  for (int64_t g = 0; g < groups; ++g) {
    held.clear();
    for (int64_t c = chunk_offset[g]; c < chunk_offset[g + 1]; ++c) {
      held.push_back({chunks[2 * c], chunks[2 * c + 1], holders + holder_offset[c],
                      holder_offset[c + 1] - holder_offset[c]});
    }
    const mflex::GroupCost c =
        model.parts(held, devices + device_offset[g], device_offset[g + 1] - device_offset[g]);
    const double values[8] = {c.wait,         c.work,   c.tail,  c.late,
                              c.optimisation, c.update, c.bytes, c.saved};
    std::copy(values, values + 8, out + 8 * g);
  }
}
