// Runs the kernels on random inputs against plain loops; built with AddressSanitizer and with
// ThreadSanitizer by tests/unit/kernels/test_builds.py. Arguments: rounds, seed.
#include "random.h"

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 50;
  const int seed = count > 2 ? std::atoi(arguments[2]) : 1;
  Random random(static_cast<uint64_t>(seed));
  for (int round = 0; round < rounds; ++round) {
    test_segments(random);
    test_streams(random);
    test_chunks(random);
    test_threads(random);
    test_turns(random);
  }
  std::printf("%d rounds passed\n", rounds);
  return 0;
}
