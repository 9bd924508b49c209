// Who copies now. Two copies at a time fill a server's memory, so further ones would only make one
// another late; the others wait for their turn, and the one that is needed first comes first.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace mflex::twin {

struct Transfer {
  bool background;  // a version for recovery: nobody waits for it yet
  uint64_t slab;    // the next iteration comes to low numbers first
  uint64_t bytes;

  // Needed earlier; of two that are needed alike, the smaller one.
  bool operator<(const Transfer& o) const {
    if (background != o.background) return o.background;
    return slab != o.slab ? slab < o.slab : bytes < o.bytes;
  }
};

class Turns {
 public:
  explicit Turns(uint64_t at_once) : at_once_(at_once) {}

  // A worker's thread, known by a number of its own, wants to copy. It has one wish at a time.
  void ask(uint64_t who, const Transfer& wish) { waiting_.emplace(wish, who); }
  // It has copied, or it is gone.
  void leave(uint64_t who);
  // Gives turns as long as there are any; who has got one by this call, in order.
  std::vector<uint64_t> give();

  uint64_t copying() const { return copying_.size(); }
  uint64_t waiting() const { return waiting_.size(); }
  uint64_t bytes_under_way() const;

 private:
  uint64_t at_once_;
  std::multimap<Transfer, uint64_t> waiting_;  // equal ones in the order in which they came
  std::map<uint64_t, uint64_t> copying_;       // who -> bytes
};

}  // namespace mflex::twin
