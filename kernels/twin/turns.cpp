#include "turns.h"

namespace mflex::twin {

void Turns::leave(uint64_t who) {
  copying_.erase(who);
  for (auto w = waiting_.begin(); w != waiting_.end();) {
    w = w->second == who ? waiting_.erase(w) : std::next(w);
  }
}

std::vector<uint64_t> Turns::give() {
  std::vector<uint64_t> given;
  while (!waiting_.empty() && copying_.size() < at_once_) {
    const auto first = waiting_.begin();
    copying_[first->second] = first->first.bytes;
    given.push_back(first->second);
    waiting_.erase(first);
  }
  return given;
}

uint64_t Turns::bytes_under_way() const {
  uint64_t bytes = 0;
  for (const auto& one : copying_) bytes += one.second;
  return bytes;
}

}  // namespace mflex::twin
