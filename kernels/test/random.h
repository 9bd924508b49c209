// A small generator and the checks of the test driver.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 1) {}

  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // Uniform in [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  std::vector<char> bytes(int64_t count) {
    std::vector<char> result(static_cast<size_t>(count));
    for (char& byte : result) byte = static_cast<char>(next());
    return result;
  }

 private:
  uint64_t state_;
};

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

void test_segments(Random& random);
void test_streams(Random& random);
void test_chunks(Random& random);
void test_threads(Random& random);
void test_turns(Random& random);
