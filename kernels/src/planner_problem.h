// The planner's tables as C sees them, and the cost of one device group.
//
// Definitions are in megatron_flex/planner/cost.py, which is also the reference that the tests
// compare with; here is the same arithmetic on prefix sums. A "step" is one unit in the order in
// which groups take units: the layer list itself for a straight pipeline; for a V, units taken in
// turn from the front and from the back, so that a run of steps is a front chunk and a back chunk.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

// Mirrored by megatron_flex/planner/native_search.py; all fields are eight bytes. Arrays named
// *_prefix have steps + 1 entries and start with 0; times are seconds, sizes bytes.
struct mflex_planner_problem {
  int64_t steps;
  int64_t devices;
  int64_t kinds;    // kinds of unit, for recompute and offload
  int64_t classes;  // classes of devices that hold the same units now; 0: no current plan
  int64_t micro_batches;
  int64_t granule;            // group sizes and offsets are multiples of this
  int64_t width;              // devices that each one stands for: sums of gradients are over all
  int64_t extra_in_flight;    // forwards in flight on top of K_s: 1 with split backward
  int64_t sharded;            // optimizer state split over the replicas
  int64_t tie_low, tie_high;  // steps that share the tied slab; -1: none
  double tied_state, tied_optimizer, tied_update, tied_reduce;
  double chain;  // one micro-batch alone, the slowest
  double max_tokens, total_tokens;
  double buffers;  // bytes on every device
  double intra_seconds_per_byte, intra_latency, inter_seconds_per_byte, inter_latency;
  double hop_intra, hop_inter;            // smallest micro-batch's activation from stage to stage
  double hop_busy_intra, hop_busy_inter;  // seconds that messages of all micro-batches block
  double hide;  // seconds of this iteration in which state for the next one may travel
  double host_seconds_per_byte;                   // exposed seconds a byte between device and host
  double offload_optimizer, offload_activations;  // 1: allowed
  const double* work_prefix;
  const double* front_forward_prefix;
  const double* hide_prefix;
  const double* reduce_prefix;
  const double* state_prefix;
  const double* optimizer_prefix;
  const double* front_activation_prefix;
  const double* back_activation_prefix;
  const double* update_prefix;
  const double* front_count_prefix;  // [kinds][steps + 1]
  const double* back_count_prefix;   // [kinds][steps + 1]
  const double* reduce_step;         // [steps]
  const double* transient_step;      // [steps], bytes a token
  const double* first_forward;       // [units + 1], seconds before a unit, smallest micro-batch
  const double* drain;               // [units + 1]
  const double* round_trip;          // [units + 1], through the units from here to the end and back
  const double* remaining;           // [units + 1], share of the work from a unit to the end
  const int64_t* front;              // [steps + 1], first unit that the front has not given
  const int64_t* back;               // [steps + 1], one past the last unit that the back still has
  const double* kind_forward;        // [kinds], seconds over all micro-batches
  const double* kind_activation;     // [kinds], bytes a token
  const double* kind_kept;           // [kinds], bytes a token if recomputed; < 0: cannot
  const double* kind_optimizer;      // [kinds], bytes
  const double* share;               // [devices + 1]
  const int64_t* top_offset;         // [devices + 2], into top_tokens
  const double* top_tokens;          // cumulative, [count(d) + 1] for each degree
  const int64_t* server;             // [devices]
  const double* budget;              // [devices]
  const int64_t* device_class;       // [devices]
  const double* fetch_bytes;         // [classes][steps + 1]
  const double* fetch_seconds;       // [classes][steps + 1], sent early
  const double* handover_seconds;    // [classes][steps + 1], handed over after the update
  const double* spare;               // [classes]
};

namespace mflex {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Largest (or smallest) value of any range, in constant time.
class RangeMax {
 public:
  RangeMax() = default;
  RangeMax(const double* values, int64_t count, double sign);
  // Over [begin, end), which must not be empty.
  double operator()(int64_t begin, int64_t end) const;

 private:
  std::vector<std::vector<double>> levels_;
  double sign_ = 1.0;
};

// A device group in numbers: devices [first, last) hold steps [begin, end).
struct Group {
  int64_t begin, end, first, last;
};

// A thing to do for memory: bytes that it saves, seconds that it takes.
struct Saving {
  double bytes, seconds;
};

// One run of units on devices that hold others besides, as in plans of any shape.
struct Chunk {
  int64_t begin, end;  // steps of a straight pipeline
  const int64_t* holders;
  int64_t degree;
};

// Parts of a group's cost, in seconds, and its bytes on each device.
struct GroupCost {
  double wait = 0, work = 0, tail = 0, late = 0, optimisation = 0, update = 0;
  double bytes = 0, saved = 0;  // bytes before optimisation, and what it must save
};

class GroupModel {
 public:
  // `extra_budget`: bytes on top of every device's budget.
  explicit GroupModel(const mflex_planner_problem& problem, double extra_budget = 0);

  // Cost of a group; infinite when it does not fit or updates longer than `update_limit`. Stops
  // early, with a lower bound, once the cost is above `limit`.
  double operator()(const Group& group, double limit, double update_limit) const;

  // All parts, without limits, for devices that hold several chunks of a straight pipeline's steps,
  // in order, with any holders. A group that cannot fit has an infinite `optimisation`.
  GroupCost parts(const std::vector<Chunk>& chunks, const int64_t* devices, int64_t count) const;

  double update(const Group& group) const;
  bool one_server(int64_t first, int64_t last) const {
    return p_.server[first] == p_.server[last - 1];
  }
  // The group and the device before it are on one server.
  bool inner_hop(const Group& g) const {
    return g.first > 0 && p_.server[g.first - 1] == p_.server[g.last - 1];
  }

 private:
  double wait(const Group& group) const;
  double work(const Group& group) const;
  double tail(const Group& group) const;
  double late(const Group& group) const;
  double bytes(const Group& group) const;
  double optimisation(const Group& group, double excess) const;
  // Adds what can be saved on `count` units of a kind in a stage that begins at unit `entry`.
  void add_savings(int64_t kind, double count, int64_t entry, int64_t degree,
                   std::vector<Saving>* savings) const;
  static double cheapest(std::vector<Saving>* savings, double excess);
  double fetch(int64_t device, const std::vector<Chunk>& chunks) const;
  int64_t in_flight(int64_t unit, int64_t degree) const;
  double top(int64_t degree, int64_t count) const;
  bool tied(const Group& g) const {
    return p_.tie_low >= 0 && g.begin <= p_.tie_low && g.end > p_.tie_high;
  }

  const mflex_planner_problem& p_;
  double extra_budget_;
  RangeMax reduce_, transient_, budget_;
  std::vector<int64_t> class_end_;  // one past the last device of the run of equal classes
  bool straight_;                   // no back chunks: steps are the units
};

}  // namespace mflex
