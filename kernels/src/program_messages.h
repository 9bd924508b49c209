// Messages on their way between devices: first in, first out for each ordered pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mflex {

class Messages {
 public:
  struct Message {
    const uint64_t* word;  // that sends it
    int64_t number;        // of that step
    int64_t next;          // in its queue, or among the free ones; -1: it is the last
  };

  explicit Messages(int64_t devices) : queues_(devices) {}

  void push(int64_t source, int64_t target, const uint64_t* word, int64_t number) {
    int64_t place = free_;
    if (place < 0) {
      place = static_cast<int64_t>(messages_.size());
      messages_.push_back({});
    } else {
      free_ = messages_[place].next;
    }
    messages_[place] = {word, number, -1};
    Queue& to = queue(source, target);
    (to.first < 0 ? to.first : messages_[to.last].next) = place;
    to.last = place;
  }

  // False if there is none.
  bool pop(int64_t source, int64_t target, Message* found) {
    Queue& from = queue(source, target);
    const int64_t place = from.first;
    if (place < 0) return false;
    *found = messages_[place];
    from.first = found->next;
    messages_[place].next = free_;
    free_ = place;
    return true;
  }

 private:
  struct Queue {
    int64_t target, first = -1, last = -1;
  };

  Queue& queue(int64_t source, int64_t target) {
    auto& found = queues_[source];
    auto at = std::find_if(found.begin(), found.end(),
                           [target](const Queue& q) { return q.target == target; });
    if (at == found.end()) at = found.insert(found.end(), Queue{target});
    return *at;
  }

  std::vector<std::vector<Queue>> queues_;  // by source
  std::vector<Message> messages_;           // of all queues, and free ones
  int64_t free_ = -1;
};

}  // namespace mflex
