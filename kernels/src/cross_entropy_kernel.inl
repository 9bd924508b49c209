// The body of the cross entropy kernels, for one vector width; see levels.inl.

// Unaligned vectors: the length of a row is any number.
using Loose = float __attribute__((vector_size(MFLEX_LANES * 4), aligned(4), may_alias));

MFLEX_INLINE Loose& loose(float* p) {
  return *reinterpret_cast<Loose*>(p);
}

// Log of the sum of exponentials of rows [begin, end).
void normalizers(const float* logits, int64_t begin, int64_t end, int64_t columns, float* out) {
  for (int64_t r = begin; r < end; ++r) {
    float* row = const_cast<float*>(logits) + r * columns;
    Vec top = Vec{} - INFINITY;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      const Vec x = loose(row + c);
      top = x > top ? x : top;
    }
    float highest = horizontal_max(top);
    for (int64_t i = c; i < columns; ++i) highest = row[i] > highest ? row[i] : highest;
    Vec total{};
    for (c = 0; c + kLanes <= columns; c += kLanes) total += exponential(loose(row + c) - highest);
    float sum = horizontal_sum(total);
    for (; c < columns; ++c) sum += exponential(Vec{} + (row[c] - highest))[0];
    out[r] = highest + logf(sum);
  }
}

// Rows [begin, end) in place: grad * (softmax - one hot of the label). A negative label is none.
void gradients(float* logits, const int64_t* labels, const float* normalizer, const float* grad,
               int64_t begin, int64_t end, int64_t columns) {
  for (int64_t r = begin; r < end; ++r) {
    float* row = logits + r * columns;
    const float shift = normalizer[r], factor = grad[r];
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes)
      loose(row + c) = exponential(loose(row + c) - shift) * factor;
    for (; c < columns; ++c) row[c] = exponential(Vec{} + (row[c] - shift))[0] * factor;
    if (labels[r] >= 0) row[labels[r]] -= factor;
  }
}
