// The body of the CPU attention kernels, for one vector width. attention.cpp includes it through
// levels.inl once for each instruction set, inside a namespace of its own.

// c[R, C vectors] (+)= a[R, depth] b[depth, C vectors]; a's element (r, k) is a[r * ra + k * ca].
template <int R, int C>
MFLEX_INLINE void tile(const float* a, int64_t ra, int64_t ca, const float* b, int64_t ldb,
                       float* c, int64_t ldc, int64_t depth, bool add) {
  Vec sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) sum[r][j] = add ? at(c + r * ldc + j * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
    for (int j = 0; j < C; ++j) row[j] = at(b + k * ldb + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const float scalar = a[r * ra + k * ca];
      for (int j = 0; j < C; ++j) sum[r][j] += row[j] * scalar;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) at(c + r * ldc + j * kLanes) = sum[r][j];
}

// The remaining rows, fewer than a tile has: R counts down to the number that is left.
template <int R, int C>
MFLEX_INLINE void edge(int64_t left, const float* a, int64_t ra, int64_t ca, const float* b,
                       int64_t ldb, float* c, int64_t ldc, int64_t depth, bool add) {
  if constexpr (R > 0) {
    if (left == R) {
      tile<R, C>(a, ra, ca, b, ldb, c, ldc, depth, add);
    } else {
      edge<R - 1, C>(left, a, ra, ca, b, ldb, c, ldc, depth, add);
    }
  }
}

template <int C>
MFLEX_INLINE void columns(int64_t rows, const float* a, int64_t ra, int64_t ca, const float* b,
                          int64_t ldb, float* c, int64_t ldc, int64_t depth, bool add) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    tile<kTileRows, C>(a + r * ra, ra, ca, b, ldb, c + r * ldc, ldc, depth, add);
  edge<kTileRows - 1, C>(rows - r, a + r * ra, ra, ca, b, ldb, c + r * ldc, ldc, depth, add);
}

// c[rows, width] (+)= a b, where width is a multiple of the vector and b, c are aligned.
__attribute__((noinline)) void multiply(int64_t rows, int64_t width, int64_t depth, const float* a,
                                        int64_t ra, int64_t ca, const float* b, int64_t ldb,
                                        float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes)
    columns<2>(rows, a, ra, ca, b + j, ldb, c + j, ldc, depth, add);
  if (j < width) columns<1>(rows, a, ra, ca, b + j, ldb, c + j, ldc, depth, add);
}

// Rotary embedding of one row in place; direction -1 turns it back, which is the gradient's way.
MFLEX_INLINE void rotate(const Attention& p, int64_t token, float direction, float* row) {
  const int64_t half = p.rotary_half;
  const float *cosine = p.cosine + token * half, *sine = p.sine + token * half;
  for (int64_t c = 0; c < half; ++c) {
    const float a = row[c], b = row[c + half], s = direction * sine[c];
    row[c] = a * cosine[c] - b * s;
    row[c + half] = b * cosine[c] + a * s;
  }
}

// One head's row as float32 times `factor`, rotated where `rotary` is set.
template <typename T>
MFLEX_INLINE void read_row(const Attention& p, const T* from, int64_t token, bool rotary,
                           float factor, float* to) {
  for (int64_t c = 0; c < p.depth; ++c) to[c] = load(from[c]) * factor;
  if (rotary && p.rotary_half > 0) rotate(p, token, 1.0f, to);
}

// Rows of one head from `token` on, padded with zeros to `width` columns.
template <typename T>
void pack_rows(const Attention& p, const T* source, int64_t stride, int64_t token, int64_t length,
               int64_t width, bool rotary, float factor, float* target) {
  for (int64_t i = 0; i < length; ++i) {
    float* to = target + i * width;
    read_row(p, source + i * stride, token + i, rotary, factor, to);
    for (int64_t c = p.depth; c < width; ++c) to[c] = 0.0f;
  }
}

// Transposed in blocks of kKeys rows: block b is [depth, kKeys], zeros where rows run out.
template <typename T>
void pack_transposed(const Attention& p, const T* source, int64_t stride, int64_t token,
                     int64_t length, bool rotary, float* row, float* target) {
  for (int64_t first = 0; first < length; first += kKeys) {
    float* block = target + first * p.depth;
    const int64_t count = length - first < kKeys ? length - first : kKeys;
    const int64_t width = padded(count);
    for (int64_t i = 0; i < count; ++i) {
      read_row(p, source + (first + i) * stride, token + first + i, rotary, 1.0f, row);
      for (int64_t c = 0; c < p.depth; ++c) block[c * kKeys + i] = row[c];
    }
    for (int64_t c = 0; c < p.depth; ++c)
      for (int64_t i = count; i < width; ++i) block[c * kKeys + i] = 0.0f;
  }
}

// Gradients of a head's rows times `factor`, turned back where `rotary` is set.
template <typename T>
void unpack_rows(const Attention& p, float* source, int64_t width, int64_t token, int64_t length,
                 bool rotary, float factor, T* target, int64_t stride) {
  for (int64_t i = 0; i < length; ++i) {
    float* row = source + i * width;
    if (rotary && p.rotary_half > 0) rotate(p, token + i, -1.0f, row);
    for (int64_t c = 0; c < p.depth; ++c) store(target[i * stride + c], row[c] * factor);
  }
}

// Multiplies probabilities by 0 or 1 / (1 - p), as the element's hash says.
MFLEX_INLINE void drop(float* row, int64_t first, int64_t count, RowKey key, uint32_t threshold,
                       float scale) {
  for (int64_t c = 0; c < count; ++c) {
    const float factor = keeps(key, static_cast<uint32_t>(first + c), threshold) ? scale : 0.0f;
    row[c] *= factor;
  }
}

// Columns of a block that queries up to `last` (exclusive) see, and those that one query sees.
MFLEX_INLINE int64_t visible(const Attention& p, int64_t query_end, int64_t first, int64_t length) {
  const int64_t stop = p.causal && query_end < length ? query_end : length;
  const int64_t count = stop - first;
  return count < 0 ? 0 : count > kKeys ? kKeys : count;
}

// One kv group of one sample: all query heads of the group, block by block (online softmax).
template <typename T>
void forward(const Attention& p, int64_t sample, int64_t group, float* scratch) {
  const int64_t begin = p.offsets[sample], length = p.offsets[sample + 1] - begin;
  const int64_t depth = p.depth, width = padded(depth), blocks = (length + kKeys - 1) / kKeys;
  float* keys = scratch;                          // [blocks][depth, kKeys]
  float* values = keys + blocks * kKeys * depth;  // [length, width]
  float* queries = values + length * width;       // [kQueries, width]
  float* scores = queries + kQueries * width;     // [kQueries, kKeys]
  float* sums = scores + kQueries * kKeys;        // [kQueries, width]
  float* line = sums + kQueries * width;          // [depth]
  float highest[kQueries], normalizer[kQueries];
  pack_transposed(p, p.key<T>(begin, group), p.key_stride, begin, length, true, line, keys);
  pack_rows(p, p.value<T>(begin, group), p.value_stride, begin, length, width, false, 1.0f, values);
  const int64_t share = p.heads / p.groups;
  for (int64_t head = group * share; head < (group + 1) * share; ++head) {
    for (int64_t q0 = 0; q0 < length; q0 += kQueries) {
      const int64_t rows = length - q0 < kQueries ? length - q0 : kQueries;
      pack_rows(p, p.query<T>(begin + q0, head), p.query_stride, begin + q0, rows, width, true,
                p.scale, queries);
      for (int64_t k0 = 0; k0 < length; k0 += kKeys) {
        const int64_t seen = visible(p, q0 + rows, k0, length), span = padded(seen);
        if (seen == 0) break;
        multiply(rows, span, depth, queries, width, 1, keys + k0 * depth, kKeys, scores, kKeys,
                 false);
        for (int64_t i = 0; i < rows; ++i) {
          float* row = scores + i * kKeys;
          const int64_t valid = visible(p, q0 + i + 1, k0, length);
          for (int64_t c = valid; c < span; ++c) row[c] = -INFINITY;
          Vec top = Vec{} - INFINITY;
          for (int64_t c = 0; c < span; c += kLanes) top = at(row + c) > top ? at(row + c) : top;
          const float before = k0 == 0 ? -INFINITY : highest[i];
          const float block = horizontal_max(top), now = block > before ? block : before;
          Vec total{};
          for (int64_t c = 0; c < span; c += kLanes) {
            const Vec e = exponential(at(row + c) - now);
            at(row + c) = e;
            total += e;
          }
          const float shrink = k0 == 0 ? 0.0f : exponential(Vec{} + (before - now))[0];
          normalizer[i] = (k0 == 0 ? 0.0f : normalizer[i] * shrink) + horizontal_sum(total);
          highest[i] = now;
          if (k0 != 0 && shrink != 1.0f)
            for (int64_t c = 0; c < width; c += kLanes) at(sums + i * width + c) *= shrink;
          if (p.token_keys != nullptr)
            drop(row, k0, valid, row_key(p.token_keys[begin + q0 + i], p.sites[head]), p.threshold,
                 p.keep_scale);
        }
        multiply(rows, width, seen, scores, kKeys, 1, values + k0 * width, width, sums, width,
                 k0 != 0);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float factor = 1.0f / normalizer[i];
        T* target = p.output<T>(begin + q0 + i, head);
        for (int64_t c = 0; c < depth; ++c) store(target[c], sums[i * width + c] * factor);
        p.lse[head * p.tokens + begin + q0 + i] = highest[i] + logf(normalizer[i]);
      }
    }
  }
}

// Gradients of one kv group of one sample; probabilities are computed again from `lse`.
template <typename T>
void backward(const Attention& p, int64_t sample, int64_t group, float* scratch) {
  const int64_t begin = p.offsets[sample], length = p.offsets[sample + 1] - begin;
  const int64_t depth = p.depth, width = padded(depth), blocks = (length + kKeys - 1) / kKeys;
  float* keys_t = scratch;                            // [blocks][depth, kKeys]
  float* values_t = keys_t + blocks * kKeys * depth;  // [blocks][depth, kKeys]
  float* keys = values_t + blocks * kKeys * depth;    // [length, width], so are the next six
  float* queries = keys + length * width;
  float* outer = queries + length * width;  // gradient of the output
  float* grad_q = outer + length * width;
  float* grad_k = grad_q + length * width;
  float* grad_v = grad_k + length * width;
  float* scores = grad_v + length * width;    // [kQueries, kKeys]: dropped probabilities
  float* slopes = scores + kQueries * kKeys;  // [kQueries, kKeys]: gradient of the scores
  float* delta = slopes + kQueries * kKeys;   // [length]
  alignas(64) float mask[kKeys];
  float* line = delta + length;  // [depth]
  const T *key = p.key<T>(begin, group), *value = p.value<T>(begin, group);
  pack_transposed(p, key, p.key_stride, begin, length, true, line, keys_t);
  pack_transposed(p, value, p.value_stride, begin, length, false, line, values_t);
  pack_rows(p, key, p.key_stride, begin, length, width, true, 1.0f, keys);
  for (int64_t i = 0; i < length * width; i += kLanes) at(grad_k + i) = at(grad_v + i) = Vec{};
  const int64_t share = p.heads / p.groups;
  for (int64_t head = group * share; head < (group + 1) * share; ++head) {
    pack_rows(p, p.query<T>(begin, head), p.query_stride, begin, length, width, true, p.scale,
              queries);
    pack_rows(p, p.grad_output<T>(begin, head), p.heads * depth, begin, length, width, false, 1.0f,
              outer);
    for (int64_t i = 0; i < length; ++i) {
      const T* out = p.output<T>(begin + i, head);
      float sum = 0.0f;
      for (int64_t c = 0; c < depth; ++c) sum += load(out[c]) * outer[i * width + c];
      delta[i] = sum;
    }
    for (int64_t i = 0; i < length * width; i += kLanes) at(grad_q + i) = Vec{};
    for (int64_t k0 = 0; k0 < length; k0 += kKeys) {
      for (int64_t q0 = p.causal ? k0 / kQueries * kQueries : 0; q0 < length; q0 += kQueries) {
        const int64_t rows = length - q0 < kQueries ? length - q0 : kQueries;
        const int64_t seen = visible(p, q0 + rows, k0, length), span = padded(seen);
        if (seen == 0) continue;
        multiply(rows, span, depth, queries + q0 * width, width, 1, keys_t + k0 * depth, kKeys,
                 scores, kKeys, false);
        multiply(rows, span, depth, outer + q0 * width, width, 1, values_t + k0 * depth, kKeys,
                 slopes, kKeys, false);
        for (int64_t i = 0; i < rows; ++i) {
          float *row = scores + i * kKeys, *slope = slopes + i * kKeys;
          const int64_t valid = visible(p, q0 + i + 1, k0, length);
          const float shift = p.lse[head * p.tokens + begin + q0 + i], less = delta[q0 + i];
          for (int64_t c = valid; c < span; ++c) row[c] = -INFINITY;
          if (p.token_keys != nullptr) {
            for (int64_t c = 0; c < span; ++c) mask[c] = 1.0f;
            drop(mask, k0, span, row_key(p.token_keys[begin + q0 + i], p.sites[head]), p.threshold,
                 p.keep_scale);
            for (int64_t c = 0; c < span; c += kLanes) {
              const Vec e = exponential(at(row + c) - shift), kept = at(mask + c);
              at(slope + c) = e * (at(slope + c) * kept - less);
              at(row + c) = e * kept;
            }
          } else {
            for (int64_t c = 0; c < span; c += kLanes) {
              const Vec e = exponential(at(row + c) - shift);
              at(slope + c) = e * (at(slope + c) - less);
              at(row + c) = e;
            }
          }
        }
        multiply(seen, width, rows, scores, 1, kKeys, outer + q0 * width, width,
                 grad_v + k0 * width, width, true);
        multiply(seen, width, rows, slopes, 1, kKeys, queries + q0 * width, width,
                 grad_k + k0 * width, width, true);
        multiply(rows, width, seen, slopes, kKeys, 1, keys + k0 * width, width, grad_q + q0 * width,
                 width, true);
      }
    }
    unpack_rows(p, grad_q, width, begin, length, true, p.scale, p.grad_query<T>(begin, head),
                p.heads * depth);
  }
  unpack_rows(p, grad_k, width, begin, length, true, 1.0f, p.grad_key<T>(begin, group),
              p.groups * depth);
  unpack_rows(p, grad_v, width, begin, length, false, 1.0f, p.grad_value<T>(begin, group),
              p.groups * depth);
}

void item(const Attention& p, int64_t sample, int64_t group, bool back, float* scratch) {
  if (p.bfloat16) {
    back ? backward<BFloat16>(p, sample, group, scratch)
         : forward<BFloat16>(p, sample, group, scratch);
  } else {
    back ? backward<float>(p, sample, group, scratch) : forward<float>(p, sample, group, scratch);
  }
}
