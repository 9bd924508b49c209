// What the validator reads, and how it says what is wrong.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// Mirrored by megatron_flex/schedule/validate.py; all fields are eight bytes.
struct mflex_validate_problem {
  int64_t devices, stages, batches, units, slabs, groups;
  int64_t train;     // 0: an evaluation
  int64_t switches;  // there is a next plan
  int64_t posted;    // receives that are posted ahead
  const uint64_t* words;
  const int64_t* word_offset;   // [devices + 1], into words
  const int64_t* sizes;         // [words], tokens of messages; null: those of the micro-batches
  const int64_t* group_offset;  // [groups + 1], into group
  const int64_t* group;
  const int64_t* tokens;        // [batches]
  const int64_t* route;         // [stages, batches], devices
  const int64_t* before;        // [batches], the slice before it in its chain; -1
  const int64_t* after;         // [batches], the slice after it
  const int64_t* stage_offset;  // [stages + 1], into holder
  const int64_t* holder;        // devices of each stage
  const int64_t* unit;          // [stages + 1], where each begins
  const int64_t* slab_offset;   // [units + 1], into slab
  const int64_t* slab;          // slabs of each unit
  const int64_t* user_offset;   // [slabs + 1], into user
  const int64_t* user;          // stages that use each slab, ascending
  const int64_t* now_offset;    // [slabs + 1], into now
  const int64_t* now;           // devices that hold each slab when it begins, ascending
  const int64_t* next_offset;   // [slabs + 1], into next
  const int64_t* next;          // and when it is over
  const int64_t* cut;           // [slabs], optimizer state is cut anew: 1, and sharded then: 2
  const int64_t* scattered;     // [slabs], sharded and not cut anew
  const int64_t* old_offset;    // [slabs + 1], into old
  const int64_t* old_part;      // [., 3]: device, start, stop: owners of what is cut anew
  const int64_t* new_offset;    // [slabs + 1], into new_part
  const int64_t* new_part;      // [., 3]: and afterwards
};

// Where and why the lists fail.
struct mflex_validate_failure {
  int64_t device, step;  // out
  int64_t num_shown;     // out; 0: those nearby
  int64_t capacity;      // bytes of reason
  int64_t* steps;        // [devices], how far each has come, out
  int64_t* shown;        // [devices], those whose lists are to be shown, out
  char* reason;          // out; "{3.17}" stands for instruction 17 of device 3
};

namespace mflex {

// Where the replay is, and the end of it: `stop` throws.
class Failure {
 public:
  struct Stopped {
    std::string reason;
    std::vector<int64_t> shown;
  };

  int64_t device = 0, step = 0;

  [[noreturn]] void stop(std::string reason, std::vector<int64_t> shown = {}) {
    throw Stopped{std::move(reason), std::move(shown)};
  }
  // At the end of a device's list.
  [[noreturn]] void stop_at_end(int64_t where, std::string reason) {
    device = where, step = -1;
    stop(std::move(reason));
  }
};

inline std::string str(int64_t number) {
  return std::to_string(number);
}

// "1, 2, 5" of ascending devices.
template <class Devices>
std::string names(const Devices& devices) {
  std::string found;
  for (const int64_t device : devices) found += (found.empty() ? "" : ", ") + str(device);
  return found;
}

}  // namespace mflex
