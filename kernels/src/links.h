// A value for each ordered pair of devices that have to do with each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mflex {

// Most devices talk with few others, so those of a source are looked through; if there are many,
// there is an index of them. A reference is good until another pair is asked for.
template <class Value>
class Links {
 public:
  explicit Links(int64_t devices) : devices_(devices), sources_(devices) {}

  Value& at(int64_t source, int64_t target) {
    Source& from = sources_[source];
    if (from.index.empty()) {
      for (auto& [to, value] : from.links) {
        if (to == target) return value;
      }
      if (from.links.size() < kFew) return from.links.emplace_back(target, Value()).second;
      from.index.assign(devices_, -1);
      for (size_t i = 0; i < from.links.size(); ++i) {
        from.index[from.links[i].first] = static_cast<int32_t>(i);
      }
    }
    int32_t& place = from.index[target];
    if (place < 0) {
      place = static_cast<int32_t>(from.links.size());
      from.links.emplace_back(target, Value());
    }
    return from.links[place].second;
  }

 private:
  static constexpr size_t kFew = 8;
  struct Source {
    std::vector<std::pair<int64_t, Value>> links;
    std::vector<int32_t> index;  // of each device into links, or -1; empty where there are few
  };

  int64_t devices_;
  std::vector<Source> sources_;
};

}  // namespace mflex
