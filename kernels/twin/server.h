// Answers the workers of one server, and knows when nobody needs it any more.
//
// A request is a line of words, further lines and a body as the word says; an answer is a JSON
// object, with "error" when the request was refused:
//
//   HELLO <attempt> <rank> <linger ms>   join the job; the arena comes beside the answer
//   LIST                                 what there is to recover from
//   ADOPT <version>                      keep this version alone; 0 forgets all
//   BEGIN <version>, lines <slab> <bytes>    room for these slabs; their offsets
//   COMMON <version>, then JSON          what belongs to the version beside the slabs
//   HANDOVER <serial>, lines <source> <slab> <bytes> <readers>    their offsets, or 0
//   TURN <background> <slab> <bytes>     answered when this connection may copy
//   DONE                                 it has copied; the end of the connection says so too
//   STATUS                               all of it, for people; needs no HELLO (nor do TURN and
//   DONE) END                                  the job ended well (or the manager is not wanted)
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "store.h"
#include "turns.h"
#include "wire.h"

namespace mflex::twin {

struct Job {
  std::string name;      // for people
  uint64_t patience_ms;  // ends when no worker has come within this time
  uint64_t at_once;      // copies at a time
};

class Server {
 public:
  Server(int listener, const Arena& arena, const Shape& shape, Job job);

  // Returns when the job ended, or nobody came (back) in time, or `stop` became true.
  void serve(const std::atomic<bool>& stop);

 private:
  struct Client {
    Client(int descriptor, uint64_t id) : connection(descriptor), number(id) {}

    Connection connection;
    uint64_t number;
    bool member = false;
    std::string attempt;
    uint64_t rank = 0;
    bool gone = false;
  };

  void accept_all();
  void handle(Client& client, const std::string& frame);
  void drop(Client& client);
  void give_turns();
  // Empty when the answer comes later.
  std::string answer(Client& client, const std::string& frame, int& beside);
  std::string list() const;
  std::string status() const;
  int patience(int64_t now);

  int listener_;
  Arena arena_;
  Store store_;
  Job job_;
  Turns turns_;
  std::vector<std::unique_ptr<Client>> clients_;
  uint64_t accepted_ = 0;
  std::string attempt_;
  uint64_t linger_ms_;
  int64_t started_, alone_since_;
  bool ended_ = false;
};

}  // namespace mflex::twin
