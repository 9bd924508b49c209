// The manager's books: which slab of which version, and which hand-over, lies where in the arena.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"

namespace mflex::twin {

// A request that cannot be granted; the words go to the worker.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Shape {
  uint64_t banks, bank_bytes, room_bytes;

  uint64_t bytes() const { return kPage + banks * bank_bytes + room_bytes; }
};

struct Bank {
  uint64_t begin = 0, used = 0;
  uint64_t version = 0;                  // 0: free
  std::map<uint64_t, uint64_t> entries;  // slab -> offset
  std::string common;                    // a JSON value, as a worker gave it
};

// A slab's state that one worker writes and others of this server read.
struct HandOver {
  uint64_t source, slab, bytes, readers;

  bool operator==(const HandOver& o) const {
    return source == o.source && slab == o.slab && bytes == o.bytes && readers == o.readers;
  }
};

struct Placed {
  HandOver wanted;
  uint64_t offset;  // 0: there is no room, it must go from worker to worker
};
using Switch = std::map<std::pair<uint64_t, uint64_t>, Placed>;  // by source and slab

class Store {
 public:
  Store(char* base, const Shape& shape);

  // Makes room for slabs (number, bytes) of a version; returns their offsets. A version is
  // overwritten only when a newer one is committed. Throws Refused, and changes nothing then.
  std::vector<uint64_t> begin(uint64_t version, uint64_t source,
                              const std::vector<std::pair<uint64_t, uint64_t>>& slabs);
  void set_common(uint64_t version, const std::string& common);
  // Keeps this version alone (0: none), as the one to go on from.
  void adopt(uint64_t version);

  // Places hand-overs of the switch with this number, each when it is first asked for: its writer
  // and its readers get the same offset. The room of earlier switches is taken back when it was
  // read, at the latest three switches on: by then all workers have passed a point that they reach
  // only after reading.
  std::vector<uint64_t> hand_over(uint64_t serial, const std::vector<HandOver>& wanted);
  // Tells whoever waits for this worker's hand-overs that it ended.
  void lose(uint64_t source);
  void forget_hand_overs();

  std::vector<Bank> versions() const;  // banks that are not free
  const Shape& shape() const { return shape_; }
  EntryHeader& entry(uint64_t offset) const;
  uint64_t committed() const { return load(&header().committed); }
  uint64_t room_used() const;

  uint64_t handed_over = 0, without_room = 0, snapshots = 0;  // counted since the start

 private:
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Bank& bank_for(uint64_t version);
  void make_entry(uint64_t offset, const HandOver& what, uint64_t version, uint64_t transfers);
  void reclaim(uint64_t serial);
  uint64_t find_room(uint64_t bytes) const;
  uint64_t under_way() const;  // hand-overs that are placed and not written

  char* base_;
  Shape shape_;
  std::vector<Bank> banks_;
  std::map<uint64_t, Switch> switches_;  // by number
  std::map<uint64_t, uint64_t> room_;    // offset -> bytes of what lies in the room
};

}  // namespace mflex::twin
