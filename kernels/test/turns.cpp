// The manager's order of transfers, against a list that is searched.
#include "turns.h"

#include <algorithm>

#include "layout.h"
#include "random.h"

namespace {

using mflex::twin::Transfer;

struct Wish {
  uint64_t who;
  Transfer what;
};

Transfer any_transfer(Random& random) {
  const auto number = [&](int64_t high) { return static_cast<uint64_t>(random.between(0, high)); };
  return {random.between(0, 1) == 1, number(4), number(2)};
}

}  // namespace

void test_turns(Random& random) {
  const uint64_t at_once = static_cast<uint64_t>(random.between(1, 4));
  mflex::twin::Turns turns(at_once);
  std::vector<Wish> waiting, copying;
  for (uint64_t who = 1; who <= 60; ++who) {
    const bool more = random.between(0, 2) > 0;
    if (more) {
      waiting.push_back({who, any_transfer(random)});
      turns.ask(who, waiting.back().what);
    }
    // Somebody is done, or a process that waits is gone.
    std::vector<Wish>& from = random.between(0, 3) == 0 ? waiting : copying;
    if (!more && !from.empty()) {
      const int64_t index = random.between(0, static_cast<int64_t>(from.size()) - 1);
      turns.leave(from[index].who);
      from.erase(from.begin() + index);
    }
    for (const uint64_t got : turns.give()) {
      // The first of the most urgent ones.
      const auto best =
          std::min_element(waiting.begin(), waiting.end(),
                           [](const Wish& a, const Wish& b) { return a.what < b.what; });
      CHECK(best != waiting.end() && best->who == got);
      copying.push_back(*best);
      waiting.erase(best);
    }
    uint64_t bytes = 0;
    for (const Wish& one : copying) bytes += one.what.bytes;
    CHECK(copying.size() <= at_once && (waiting.empty() || copying.size() == at_once));
    CHECK(turns.copying() == copying.size() && turns.waiting() == waiting.size());
    CHECK(turns.bytes_under_way() == bytes);
  }
  const uint64_t size = static_cast<uint64_t>(random.between(1, 1 << 28));
  uint64_t before = 0;
  for (uint64_t others = 1; others <= 32; ++others) {
    const uint64_t chunk = mflex::twin::chunk_bytes_for(size, others);
    CHECK(chunk >= mflex::twin::kMinChunk && chunk <= mflex::twin::kMaxChunk && chunk >= before);
    // Alone, a reader starts after a sixteenth or after the smallest chunk.
    CHECK(others > 1 || chunk == mflex::twin::kMinChunk || 15 * chunk <= size);
    before = chunk;
  }
}
