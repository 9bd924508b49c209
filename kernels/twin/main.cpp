// The TwinLayer manager: one process for each server of a job, in a session of its own.
//
//   twin_manager --socket PATH --job TEXT --banks N --bank-bytes B --room-bytes R --patience MS
//                --at-once N
//   twin_manager --available [ROOT]
//
// The first reserves memory, leaves a process behind that serves PATH, prints one line, and ends:
// "ready PID", "exists" when another manager serves PATH, or "error WORDS" with status 1. The
// second prints the bytes of memory that may be taken, and where the limit comes from.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>

#include "memory.h"
#include "server.h"

namespace mflex::twin {
namespace {

namespace fs = std::filesystem;

std::atomic<bool> stop{false};

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw std::runtime_error("the path of the socket is too long: " + path);
  }
  memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

// Whether a process listens there.
bool answers(const std::string& path) {
  const sockaddr_un address = address_of(path);
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int result = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const bool alive = result == 0 || errno == EAGAIN;  // EAGAIN: its queue is full
  close(probe);
  return alive;
}

// A listening socket of mode 0600; -1 when another manager has it. Sockets of dead managers in the
// directory are removed. The lock on the directory ends with this function.
int listen_at(const std::string& path) {
  const fs::path directory = fs::path(path).parent_path();
  const int lock = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock < 0 || flock(lock, LOCK_EX) != 0) {
    throw std::runtime_error("cannot lock " + directory.string() + ": " + strerror(errno));
  }
  struct Unlock {
    int descriptor;
    ~Unlock() { close(descriptor); }
  } unlock{lock};
  if (answers(path)) return -1;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_socket() && !answers(entry.path())) unlink(entry.path().c_str());
  }
  const sockaddr_un address = address_of(path);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  umask(0177);
  if (listener < 0 ||
      bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener, 1024) != 0) {
    throw std::runtime_error("cannot listen at " + path + ": " + strerror(errno));
  }
  return listener;
}

void check_memory(uint64_t bytes) {
  const Available left = available_memory("");
  if (bytes > left.bytes) {
    throw std::runtime_error("host copies of layers take " + std::to_string(bytes) +
                             " bytes of memory, but only " + std::to_string(left.bytes) +
                             " are available " + left.where);
  }
}

void say(int descriptor, const std::string& line) {
  const std::string text = line + "\n";
  if (write(descriptor, text.data(), text.size()) < 0) return;  // the starter has gone
}

// The life of the manager; `report` is the starter's ear.
int manage(const std::string& path, const Shape& shape, const Job& job, int report) {
  setsid();
  if (chdir("/") != 0) return 1;
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, [](int) { stop = true; });
  int listener = -1;
  try {
    listener = listen_at(path);
    if (listener < 0) {
      say(report, "exists");
      return 0;
    }
    check_memory(shape.bytes());
    const Arena arena = make_arena(shape.bytes());
    say(report, "ready " + std::to_string(getpid()));
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int standard = 0; standard < 3; ++standard) dup2(null, standard);
    close(report);
    Server(listener, arena, shape, job).serve(stop);
  } catch (const std::exception& error) {
    say(report, std::string("error ") + error.what());
    if (listener >= 0) unlink(path.c_str());
    return 1;
  }
  unlink(path.c_str());
  return 0;
}

uint64_t number(const std::map<std::string, std::string>& options, const char* name) {
  const auto found = options.find(name);
  char* end = nullptr;
  const uint64_t value = found == options.end() ? 0 : strtoull(found->second.c_str(), &end, 10);
  if (end == nullptr || *end != '\0' || value > (uint64_t{1} << 60)) {
    throw std::runtime_error(std::string(name) + " needs a number");
  }
  return value;
}

int start(const std::map<std::string, std::string>& options) {
  const Shape shape{number(options, "--banks"), round_up(number(options, "--bank-bytes"), kPage),
                    round_up(number(options, "--room-bytes"), kPage)};
  const Job job{options.at("--job"), number(options, "--patience"),
                std::max<uint64_t>(number(options, "--at-once"), 1)};
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error(std::string("cannot fork: ") + strerror(errno));
  if (child == 0) {
    close(ends[0]);
    _exit(manage(options.at("--socket"), shape, job, ends[1]));
  }
  close(ends[1]);
  std::string line;
  char letter;
  while (read(ends[0], &letter, 1) == 1 && letter != '\n') line += letter;
  if (line.empty()) line = "error the manager ended before it was ready";
  puts(line.c_str());
  return line.rfind("error", 0) == 0 ? 1 : 0;
}

}  // namespace
}  // namespace mflex::twin

int main(int count, char** words) {
  using namespace mflex::twin;
  if (count >= 2 && std::string(words[1]) == "--available") {
    const Available left = available_memory(count > 2 ? words[2] : "");
    printf("%llu %s\n", static_cast<unsigned long long>(left.bytes), left.where.c_str());
    return 0;
  }
  std::map<std::string, std::string> options;
  for (int i = 1; i + 1 < count; i += 2) options[words[i]] = words[i + 1];
  try {
    return start(options);
  } catch (const std::exception& error) {
    printf("error %s\n", error.what());
    return 1;
  }
}
