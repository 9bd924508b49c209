// Frames over a Unix socket: a length of 32 bits, little end first, then so many bytes of text.
#pragma once

#include <cstdint>
#include <string>

namespace mflex::twin {

constexpr uint32_t kLongestFrame = 64 << 20;

// One side of a connection. Nothing blocks; what cannot be sent at once is kept.
class Connection {
 public:
  explicit Connection(int descriptor) : descriptor_(descriptor) {}

  int descriptor() const { return descriptor_; }
  bool wants_to_send() const { return !out_.empty(); }

  // Takes in what has come; false when the peer is gone.
  bool receive();
  // Takes the next whole frame; false when there is none. Throws Refused for one that is too long.
  bool next(std::string& frame);
  // Queues a frame, with a file descriptor beside its first byte unless it is -1.
  void send(const std::string& frame, int beside = -1);
  // Sends what is queued as far as it goes; false when the peer is gone.
  bool flush();

 private:
  int descriptor_;
  std::string in_, out_;
  int beside_ = -1;
};

// `text` as a JSON string, quotes included.
std::string quoted(const std::string& text);

}  // namespace mflex::twin
