// The body of the SwiGLU kernels, for one vector width; see levels.inl.

template <typename T>
MFLEX_INLINE Vec read(const T* from, int64_t count) {
  alignas(64) float lanes[kLanes] = {};
  if (count == kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = load(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) lanes[i] = load(from[i]);
  }
  return at(lanes);
}

template <typename T>
MFLEX_INLINE void write(Vec value, int64_t count, T* to) {
  alignas(64) float lanes[kLanes];
  at(lanes) = value;
  if (count == kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) store(to[i], lanes[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) store(to[i], lanes[i]);
  }
}

MFLEX_INLINE Vec sigmoid(Vec x) {
  const Vec zero{};
  const Vec e = exponential(x < zero ? x : -x);
  return (x < zero ? e : zero + 1.0f) / (e + 1.0f);
}

// Rows [begin, end) of x [rows, 2 * columns] = (gate, up): out = silu(gate) * up, or, where `grad`
// is given, out [rows, 2 * columns] = gradients of gate and up.
template <typename T>
void swiglu_rows(const T* x, const T* grad, int64_t begin, int64_t end, int64_t columns, T* out) {
  for (int64_t r = begin; r < end; ++r) {
    const T *gates = x + 2 * r * columns, *ups = gates + columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t count = columns - c < kLanes ? columns - c : kLanes;
      const Vec gate = read(gates + c, count), up = read(ups + c, count), s = sigmoid(gate);
      if (grad == nullptr) {
        write(gate * s * up, count, out + r * columns + c);
      } else {
        const Vec g = read(grad + r * columns + c, count);
        write(g * up * s * (1.0f + gate * (1.0f - s)), count, out + 2 * r * columns + c);
        write(g * gate * s, count, out + (2 * r + 1) * columns + c);
      }
    }
  }
}

void swiglu(const void* x, const void* grad, int64_t begin, int64_t end, int64_t columns,
            int32_t dtype, void* out) {
  if (dtype == 0) {
    swiglu_rows(static_cast<const float*>(x), static_cast<const float*>(grad), begin, end, columns,
                static_cast<float*>(out));
  } else {
    swiglu_rows(static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(grad), begin, end,
                columns, static_cast<BFloat16*>(out));
  }
}
