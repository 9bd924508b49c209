#include "cast.h"

#include "copies.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kGrain = 64 << 10;  // elements

MFLEX_CLONES void narrow(uint16_t* __restrict target, const uint32_t* __restrict source,
                         int64_t count, uint16_t nan_bits) {
  for (int64_t i = 0; i < count; ++i) target[i] = to_bfloat16(source[i], nan_bits);
}

MFLEX_CLONES void widen(uint32_t* __restrict target, const uint16_t* __restrict source,
                        int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = to_float32(source[i]);
}

}  // namespace
}  // namespace mflex

MFLEX_API void mflex_cast_float32_to_bfloat16(const uint32_t* source, uint16_t* target,
                                              int64_t count, uint32_t nan_bits, int32_t threads) {
  mflex::parallel_for(count, mflex::kGrain, threads, [&](int64_t begin, int64_t end) {
    mflex::narrow(target + begin, source + begin, end - begin, static_cast<uint16_t>(nan_bits));
  });
}

MFLEX_API void mflex_cast_bfloat16_to_float32(const uint16_t* source, uint32_t* target,
                                              int64_t count, int32_t threads) {
  mflex::parallel_for(count, mflex::kGrain, threads, [&](int64_t begin, int64_t end) {
    mflex::widen(target + begin, source + begin, end - begin);
  });
}

MFLEX_API void mflex_cast_float32_to_bfloat16_by_lanes(const uint32_t* source, uint16_t* target,
                                                       int64_t count, uint32_t nan_bits,
                                                       int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    mflex::narrow_lane(target, source, count, static_cast<uint16_t>(nan_bits), lane, lanes);
  }
}

MFLEX_API void mflex_cast_bfloat16_to_float32_by_lanes(const uint16_t* source, uint32_t* target,
                                                       int64_t count, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    mflex::widen_lane(target, source, count, lane, lanes);
  }
}
