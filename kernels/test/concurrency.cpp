// What several threads do at once: a writer and a reader of chunks, and callers of the pool.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "copies.h"
#include "parallel.h"
#include "random.h"

namespace {

constexpr int64_t kSecond = 1000000000;

}  // namespace

void test_chunks(Random& random) {
  const int64_t bytes = random.between(0, 200000), chunk_bytes = random.between(1, 20000);
  const int64_t chunks = (bytes + chunk_bytes - 1) / chunk_bytes;
  const int32_t writers = static_cast<int32_t>(random.between(1, 3));
  const int32_t readers = static_cast<int32_t>(random.between(1, 3));
  const std::vector<char> source = random.bytes(bytes);
  std::vector<char> arena(source.size()), target(source.size());
  std::vector<uint64_t> flags(static_cast<size_t>(chunks));
  for (uint64_t version = 1; version <= 2; ++version) {
    std::fill(target.begin(), target.end(), 0);
    std::thread writer([&] {
      mflex_chunked_write(source.data(), arena.data(), bytes, chunk_bytes, flags.data(), version,
                          writers);
    });
    const int64_t result = mflex_chunked_read(arena.data(), target.data(), bytes, chunk_bytes,
                                              flags.data(), version, 20 * kSecond, readers);
    writer.join();
    CHECK(result == 0);
    CHECK(target == source);
  }
  if (chunks == 0) return;
  const int64_t chunk = random.between(0, chunks - 1);
  flags[chunk] = 0;
  CHECK(mflex_chunked_read(arena.data(), target.data(), bytes, chunk_bytes, flags.data(), 2, 0,
                           1) == 1 + chunk);
  flags[chunk] = 3;
  CHECK(mflex_chunked_read(arena.data(), target.data(), bytes, chunk_bytes, flags.data(), 2, 0,
                           1) == -1 - chunk);
}

void test_threads(Random& random) {
  const int64_t count = random.between(0, 100000), grain = random.between(1, 3000);
  const int threads = static_cast<int>(random.between(0, 6));
  auto fill = [&](std::vector<char>& seen) {
    mflex::parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
      CHECK(begin % grain == 0 && (end % grain == 0 || end == count));
      for (int64_t i = begin; i < end; ++i) ++seen[i];
    });
  };
  std::vector<std::vector<char>> seen(3, std::vector<char>(static_cast<size_t>(count)));
  std::vector<std::thread> callers;
  for (std::vector<char>& one : seen) callers.emplace_back([&] { fill(one); });
  for (std::thread& caller : callers) caller.join();
  for (const std::vector<char>& one : seen) {
    CHECK(std::all_of(one.begin(), one.end(), [](char times) { return times == 1; }));
  }
#if !defined(MFLEX_SANITIZED)  // the sanitizers' own runtimes do not survive a fork with threads
  if (random.between(0, 20) == 0) {
    const pid_t child = fork();
    if (child == 0) {
      std::vector<char> again(static_cast<size_t>(count));
      fill(again);
      _exit(std::all_of(again.begin(), again.end(), [](char t) { return t == 1; }) ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
#endif
}
