#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>

#include "store.h"

namespace mflex::twin {

bool Connection::receive() {
  char buffer[65536];
  for (;;) {
    const ssize_t got = recv(descriptor_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (got > 0) {
      in_.append(buffer, static_cast<size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
}

bool Connection::next(std::string& frame) {
  if (in_.size() < 4) return false;
  uint32_t length = 0;
  for (int i = 3; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(in_[i]);
  if (length > kLongestFrame) throw Refused("a request is too long");
  if (in_.size() < 4 + size_t{length}) return false;
  frame.assign(in_, 4, length);
  in_.erase(0, 4 + size_t{length});
  return true;
}

void Connection::send(const std::string& frame, int beside) {
  const uint32_t length = static_cast<uint32_t>(frame.size());
  for (int i = 0; i < 4; ++i) out_.push_back(static_cast<char>(length >> (8 * i)));
  out_ += frame;
  if (beside >= 0) beside_ = beside;
}

bool Connection::flush() {
  while (!out_.empty()) {
    iovec part{out_.data(), out_.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (beside_ >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(header), &beside_, sizeof(int));
    }
    const ssize_t sent = sendmsg(descriptor_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    beside_ = -1;
    out_.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace mflex::twin
