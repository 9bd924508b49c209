// The price of a live switch, as megatron_flex/planner/switching.py defines it; the look-ahead
// prices thousands of them.
#include <algorithm>
#include <vector>

#include "api.h"

namespace {

struct Wire {
  double latency, seconds_per_byte;
  double seconds(double bytes) const { return latency + bytes * seconds_per_byte; }
};

// Seconds at both ends of every link, when all transfers run at once.
struct Ends {
  std::vector<double> out, in;
  explicit Ends(int64_t count) : out(count, 0.0), in(count, 0.0) {}
  void add(int64_t source, int64_t target, double seconds) {
    out[source] += seconds;
    in[target] += seconds;
  }
  double worst() const {
    return std::max(*std::max_element(out.begin(), out.end()),
                    *std::max_element(in.begin(), in.end()));
  }
};

}  // namespace

// Slab s is held by devices old_devices[old_offset[s] .. old_offset[s + 1]) before and by
// new_devices[...] after, both ascending. A new holder receives size[s] bytes, or with sharded
// state parameters[s] + optimizer[s] / holders; an old one what it lacks of its new part. `wires`:
// latency and seconds a byte within a server, between servers, to the host. out[0]: seconds that
// early transfers take; out[1]: seconds of the hand-over of the rest; out[2]: bytes that travel.
MFLEX_API void mflex_planner_switch(int64_t slabs, const int64_t* old_offset,
                                    const int64_t* old_devices, const int64_t* new_offset,
                                    const int64_t* new_devices, const double* parameters,
                                    const double* optimizer, const double* gradients,
                                    int64_t sharded, int64_t devices, int64_t per_server,
                                    const double* wires, const double* spare, double* out) {
  const Wire intra{wires[0], wires[1]}, inter{wires[2], wires[3]}, host{wires[4], wires[5]};
  const int64_t servers = (devices + per_server - 1) / per_server;
  std::vector<double> left(spare, spare + devices), load(devices, 0.0);
  Ends early(devices), early_servers(servers), late(devices), late_servers(servers);
  Ends copies(devices);
  std::vector<int64_t> writers;
  double moved = 0.0;
  for (int64_t s = 0; s < slabs; ++s) {
    const int64_t* old_begin = old_devices + old_offset[s];
    const int64_t* old_end = old_devices + old_offset[s + 1];
    const int64_t* new_begin = new_devices + new_offset[s];
    const int64_t* new_end = new_devices + new_offset[s + 1];
    const auto degree = static_cast<double>(new_end - new_begin);
    const double shard = sharded ? optimizer[s] / degree : optimizer[s];
    writers.clear();
    for (const int64_t* device = new_begin; device != new_end; ++device) {
      double need = parameters[s] + shard, room = need + gradients[s];
      const int64_t* held = std::lower_bound(old_begin, old_end, *device);
      if (held != old_end && *held == *device) {
        if (!sharded) continue;
        const auto before = static_cast<double>(old_end - old_begin);
        const auto was = static_cast<double>(held - old_begin);
        const auto is = static_cast<double>(device - new_begin);
        const double both = std::min((was + 1.0) / before, (is + 1.0) / degree) -
                            std::max(was / before, is / degree);
        const double lacks = 1.0 / degree - std::max(0.0, both);
        if (lacks <= 1e-9) continue;
        need = optimizer[s] * lacks;
        room = shard;
      }
      // The least loaded holder, on the device's own server if there is one.
      int64_t source = -1;
      const int64_t server = *device / per_server;
      for (const int64_t* d = old_begin; d != old_end; ++d) {
        if (*d == *device) continue;
        if (source < 0) {
          source = *d;
          continue;
        }
        const bool far = *d / per_server != server, best_far = source / per_server != server;
        if (far != best_far ? best_far : load[*d] < load[source]) source = *d;
      }
      if (source < 0 || need <= 0.0) continue;
      load[source] += need;
      moved += need;
      const int64_t from = source / per_server;
      const bool across = from != server;
      const bool fits = left[*device] >= room;
      const double shared = need * inter.seconds_per_byte / static_cast<double>(per_server);
      if (fits) {
        left[*device] -= room;
        early.add(source, *device, (across ? inter : intra).seconds(need));
        if (across) early_servers.add(from, server, shared);
        continue;
      }
      if (across) {
        late.add(source, *device, inter.seconds(need));
        late_servers.add(from, server, shared);
      }
      copies.in[*device] += host.seconds(need);
      if (std::find(writers.begin(), writers.end(), source) == writers.end()) {
        writers.push_back(source);
        copies.out[source] += host.seconds(need);
      }
    }
  }
  out[2] = moved;
  out[0] = std::max(early.worst(), early_servers.worst());
  out[1] = std::max({copies.worst(), late.worst(), late_servers.worst()});
}
