#include "server.h"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace mflex::twin {
namespace {

int64_t now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000} + time.tv_nsec / 1000000;
}

// The numbers of one line; throws Refused unless there are exactly `count` of them.
std::vector<uint64_t> numbers(const std::string& line, size_t count) {
  std::istringstream words(line);
  std::vector<uint64_t> found;
  std::string word;
  while (words >> word) {
    const bool digits = word.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || word.size() > 18) throw Refused("'" + word + "' is not a number");
    found.push_back(std::stoull(word));
  }
  if (found.size() != count)
    throw Refused("'" + line + "' needs " + std::to_string(count) + " numbers");
  return found;
}

template <typename Items, typename Text>
std::string array(const Items& items, const Text& text) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + text(item);
  return out + "]";
}

std::string field(const char* name, uint64_t value) {
  return "\"" + std::string(name) + "\":" + std::to_string(value);
}

}  // namespace

Server::Server(int listener, const Arena& arena, const Shape& shape, Job job)
    : listener_(listener),
      arena_(arena),
      store_(arena.base, shape),
      job_(std::move(job)),
      turns_(job_.at_once),
      linger_ms_(job_.patience_ms),
      started_(now_ms()),
      alone_since_(started_) {}

void Server::serve(const std::atomic<bool>& stop) {
  while (!ended_ && !stop) {
    std::vector<pollfd> polled{{listener_, POLLIN, 0}};
    for (const auto& client : clients_) {
      const short events = client->connection.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
      polled.push_back({client->connection.descriptor(), events, 0});
    }
    const int wait = patience(now_ms());
    if (wait == 0) return;
    // A signal may come between the test of `stop` and the call: hence the limit.
    if (poll(polled.data(), polled.size(), std::min(wait, 500)) <= 0) continue;
    for (size_t i = 1; i < polled.size(); ++i) {
      Client& client = *clients_[i - 1];
      if (polled[i].revents == 0) continue;
      const bool alive = client.connection.receive();
      std::string frame;
      try {
        while (!client.gone && client.connection.next(frame)) handle(client, frame);
      } catch (const Refused&) {
        drop(client);
      }
      if (!alive || !client.connection.flush()) drop(client);
    }
    give_turns();
    if (polled[0].revents != 0) accept_all();
    const auto gone = [](const auto& client) { return client->gone; };
    clients_.erase(std::remove_if(clients_.begin(), clients_.end(), gone), clients_.end());
  }
}

// Milliseconds until nobody has needed this manager for too long; a large number while one does.
int Server::patience(int64_t now) {
  constexpr int64_t kLong = 1 << 30;
  for (const auto& client : clients_) {
    if (!client->member) continue;
    alone_since_ = now;
    return kLong;
  }
  const int64_t left = alone_since_ + static_cast<int64_t>(linger_ms_) - now;
  return static_cast<int>(std::clamp<int64_t>(left, 0, kLong));
}

void Server::accept_all() {
  const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) return;
  ucred peer{};
  socklen_t size = sizeof(peer);
  // The socket's mode and its directory's keep others out; this is the second lock.
  if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
      (peer.uid != geteuid() && peer.uid != 0)) {
    close(descriptor);
    return;
  }
  clients_.push_back(std::make_unique<Client>(descriptor, ++accepted_));
}

void Server::drop(Client& client) {
  if (client.gone) return;
  client.gone = true;
  close(client.connection.descriptor());
  turns_.leave(client.number);
  // Ranks of an earlier attempt are others' now.
  if (client.member && client.attempt == attempt_) store_.lose(client.rank);
}

void Server::give_turns() {
  for (const uint64_t number : turns_.give()) {
    for (const auto& client : clients_) {
      if (client->number != number) continue;
      client->connection.send("{}");
      // One that is gone gives its turn back in the next round.
      client->connection.flush();
    }
  }
}

void Server::handle(Client& client, const std::string& frame) {
  int beside = -1;
  std::string reply;
  try {
    reply = answer(client, frame, beside);
  } catch (const Refused& refused) {
    reply = "{\"error\":" + quoted(refused.what()) + "}";
  }
  if (!reply.empty()) client.connection.send(reply, beside);
}

std::string Server::answer(Client& client, const std::string& frame, int& beside) {
  std::istringstream lines(frame);
  std::string first, line;
  std::getline(lines, first);
  const size_t space = first.find(' ');
  const std::string verb = first.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : first.substr(space + 1);
  if (verb == "STATUS") return status();
  if (verb == "END") {
    ended_ = true;
    return "{}";
  }
  if (verb == "HELLO") {
    const size_t end = rest.find(' ');
    const std::string attempt = rest.substr(0, end);
    const auto n = numbers(end == std::string::npos ? "" : rest.substr(end), 2);
    if (attempt != attempt_) {  // the workers of an earlier attempt are dead
      attempt_ = attempt;
      store_.forget_hand_overs();
    }
    client.member = true;
    client.attempt = attempt;
    client.rank = n[0];
    linger_ms_ = n[1];
    alone_since_ = now_ms();
    beside = arena_.descriptor;
    return "{" + field("pid", static_cast<uint64_t>(getpid())) + "," +
           field("bytes", arena_.bytes) + "," + field("banks", store_.shape().banks) + "," +
           field("bank_bytes", store_.shape().bank_bytes) + "," +
           field("room_bytes", store_.shape().room_bytes) + "}";
  }
  if (verb == "TURN") {
    const auto n = numbers(rest, 3);
    turns_.leave(client.number);
    turns_.ask(client.number, {n[0] != 0, n[1], n[2]});
    return "";
  }
  if (verb == "DONE") {
    turns_.leave(client.number);
    return "{}";
  }
  if (!client.member) throw Refused("say HELLO first");
  if (verb == "LIST") return list();
  if (verb == "ADOPT") {
    store_.adopt(numbers(rest, 1)[0]);
    return "{}";
  }
  if (verb == "COMMON") {
    const size_t body = frame.find('\n');
    if (body == std::string::npos) throw Refused("COMMON needs a body");
    store_.set_common(numbers(rest, 1)[0], frame.substr(body + 1));
    return "{}";
  }
  const auto as_text = [](uint64_t value) { return std::to_string(value); };
  if (verb == "BEGIN") {
    std::vector<std::pair<uint64_t, uint64_t>> slabs;
    while (std::getline(lines, line)) {
      const auto n = numbers(line, 2);
      slabs.emplace_back(n[0], n[1]);
    }
    return "{\"offsets\":" + array(store_.begin(numbers(rest, 1)[0], client.rank, slabs), as_text) +
           "}";
  }
  if (verb == "HANDOVER") {
    std::vector<HandOver> wanted;
    while (std::getline(lines, line)) {
      const auto n = numbers(line, 4);
      wanted.push_back({n[0], n[1], n[2], n[3]});
    }
    return "{\"offsets\":" + array(store_.hand_over(numbers(rest, 1)[0], wanted), as_text) + "}";
  }
  throw Refused("there is no request '" + verb.substr(0, 20) + "'");
}

std::string Server::list() const {
  const auto version = [this](const Bank& bank) {
    const auto slab = [this](const auto& entry) {
      const EntryHeader& header = store_.entry(entry.second);
      const bool complete = load(&header.state) == kComplete;
      return "[" + std::to_string(entry.first) + "," + std::to_string(entry.second) + "," +
             (complete ? "true" : "false") + "]";
    };
    return "{" + field("version", bank.version) + ",\"slabs\":" + array(bank.entries, slab) +
           ",\"common\":" + (bank.common.empty() ? "null" : bank.common) + "}";
  };
  return "{\"versions\":" + array(store_.versions(), version) + "}";
}

std::string Server::status() const {
  const auto version = [this](const Bank& bank) {
    uint64_t complete = 0, bytes = 0;
    for (const auto& entry : bank.entries) {
      complete += load(&store_.entry(entry.second).state) == kComplete;
      bytes += store_.entry(entry.second).bytes;
    }
    return "{" + field("version", bank.version) + "," + field("slabs", bank.entries.size()) + "," +
           field("complete", complete) + "," + field("bytes", bytes) + "}";
  };
  std::vector<uint64_t> ranks;
  for (const auto& client : clients_) {
    if (client->member && !client->gone) ranks.push_back(client->rank);
  }
  std::sort(ranks.begin(), ranks.end());
  const auto as_text = [](uint64_t value) { return std::to_string(value); };
  return "{" + field("pid", static_cast<uint64_t>(getpid())) + ",\"job\":" + quoted(job_.name) +
         ",\"attempt\":" + quoted(attempt_) + ",\"workers\":" + array(ranks, as_text) + "," +
         field("seconds", static_cast<uint64_t>(now_ms() - started_) / 1000) + "," +
         field("bytes", arena_.bytes) + "," + field("banks", store_.shape().banks) + "," +
         field("bank_bytes", store_.shape().bank_bytes) +
         ",\"versions\":" + array(store_.versions(), version) + "," +
         field("committed", store_.committed()) + "," + field("snapshots", store_.snapshots) + "," +
         field("room_bytes", store_.shape().room_bytes) + "," +
         field("room_used", store_.room_used()) + "," + field("handed_over", store_.handed_over) +
         "," + field("without_room", store_.without_room) + "," +
         field("copying", turns_.copying()) + "," + field("waiting", turns_.waiting()) + "," +
         field("bytes_under_way", turns_.bytes_under_way()) + "," + field("linger_ms", linger_ms_) +
         "}";
}

}  // namespace mflex::twin
