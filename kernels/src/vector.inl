// Vectors of MFLEX_LANES floats and their exponential; included by levels.inl.

using Vec = float __attribute__((vector_size(MFLEX_LANES * 4), may_alias));
using IntVec = int32_t __attribute__((vector_size(MFLEX_LANES * 4), may_alias));
constexpr int64_t kLanes = MFLEX_LANES;
constexpr int kTileRows = MFLEX_TILE_ROWS;

MFLEX_INLINE Vec& at(float* p) {
  return *reinterpret_cast<Vec*>(p);
}
MFLEX_INLINE const Vec& at(const float* p) {
  return *reinterpret_cast<const Vec*>(p);
}
MFLEX_INLINE int64_t padded(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// e^x to about one unit in the last place; exactly 0 below -87.3.
MFLEX_INLINE Vec exponential(Vec x) {
  constexpr float kLowest = -87.3f, kMagic = 12582912.0f;
  const Vec lowest = Vec{} + kLowest;
  const Vec clamped = x < lowest ? lowest : x;
  const Vec shifted = clamped * 1.44269504088896341f + kMagic;
  const Vec n = shifted - kMagic;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec y = Vec{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntVec exponent = (reinterpret_cast<IntVec>(shifted) - 0x4B400000) << 23;
  const IntVec bits = reinterpret_cast<IntVec>(y) + exponent;
  const Vec result = x < lowest ? Vec{} : reinterpret_cast<Vec>(bits);
  return x == x ? result : x;  // NaN stays NaN
}

MFLEX_INLINE float horizontal_sum(Vec v) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

MFLEX_INLINE float horizontal_max(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
