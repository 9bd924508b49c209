// Messages on their way between devices: first in, first out for each ordered pair. A message can
// be taken when its receive is posted.
#pragma once

#include <cstdint>
#include <vector>

#include "links.h"

namespace mflex {

class Messages {
 public:
  struct Message {
    const uint64_t* word;  // that sends it
    int64_t number;        // of that step
    int64_t next;          // in its queue, or among the free ones; -1: it is the last
  };

  explicit Messages(int64_t devices) : queues_(devices), sent_(devices), gone_(devices) {}

  void push(int64_t source, int64_t target, const uint64_t* word, int64_t number) {
    int64_t place = free_;
    if (place < 0) {
      place = static_cast<int64_t>(messages_.size());
      messages_.push_back({});
    } else {
      free_ = messages_[place].next;
    }
    messages_[place] = {word, number, -1};
    Queue& to = queues_.at(source, target);
    sent_[source].push_back({target, to.sent++, number});
    (to.first < 0 ? to.first : messages_[to.last].next) = place;
    to.last = place;
  }

  // False if there is none.
  bool pop(int64_t source, int64_t target, Message* found) {
    Queue& from = queues_.at(source, target);
    const int64_t place = from.first;
    if (place < 0) return false;
    *found = messages_[place];
    from.first = found->next;
    messages_[place].next = free_;
    free_ = place;
    return true;
  }

  // One more receive of a message from `source` is posted.
  void post(int64_t source, int64_t target) { ++queues_.at(source, target).posted; }

  // One that was sent; `order`: how many were sent to the same target before.
  struct Sent {
    int64_t target, order, number;
  };

  // The first message that keeps all but the last `under_way` from being taken; null: none does.
  const Sent* untaken(int64_t source, int64_t under_way) {
    const auto& sent = sent_[source];
    int64_t& gone = gone_[source];
    for (; gone + under_way < static_cast<int64_t>(sent.size()); ++gone) {
      if (queues_.at(source, sent[gone].target).posted <= sent[gone].order) return &sent[gone];
    }
    return nullptr;
  }

 private:
  struct Queue {
    int64_t first = -1, last = -1;
    int64_t sent = 0, posted = 0;  // messages and receives so far
  };

  Links<Queue> queues_;
  std::vector<Message> messages_;  // of all queues, and free ones
  int64_t free_ = -1;
  std::vector<std::vector<Sent>> sent_;  // by source
  std::vector<int64_t> gone_;            // of those: taken
};

}  // namespace mflex
