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
MFLEX_INLINE void rotate(const Turn& turn, int64_t i, float direction, float* row) {
  const int64_t half = turn.half;
  const float *cosine = turn.cosine + i * half, *sine = turn.sine + i * half;
  for (int64_t c = 0; c < half; ++c) {
    const float a = row[c], b = row[c + half], s = direction * sine[c];
    row[c] = a * cosine[c] - b * s;
    row[c + half] = b * cosine[c] + a * s;
  }
}

// Row `i` of one head as float32 times `factor`, turned by its position.
template <typename T>
MFLEX_INLINE void read_row(const Rows<T>& rows, int64_t i, int64_t depth, const Turn& turn,
                           float factor, float* to) {
  const T* from = rows.first + i * rows.stride;
  for (int64_t c = 0; c < depth; ++c) to[c] = load(from[c]) * factor;
  if (turn.half > 0) rotate(turn, i, 1.0f, to);
}

// Rows of one head, padded with zeros to `width` columns.
template <typename T>
void pack_rows(const Rows<T>& rows, int64_t length, int64_t depth, int64_t width, const Turn& turn,
               float factor, float* target) {
  for (int64_t i = 0; i < length; ++i) {
    float* to = target + i * width;
    read_row(rows, i, depth, turn, factor, to);
    for (int64_t c = depth; c < width; ++c) to[c] = 0.0f;
  }
}

// Exchanges the bits S of row and column in a square of vectors; over all S, that transposes it.
template <int S, size_t... L>
MFLEX_INLINE void exchange(Vec* square, std::index_sequence<L...>) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Vec a = square[i], b = square[i + S];
#if defined(__clang__)
    square[i] = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L - S : L)...);
    square[i + S] = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L : L + S)...);
#else
    square[i] = __builtin_shuffle(a, b, IntVec{((L & S) ? int(kLanes + L - S) : int(L))...});
    square[i + S] = __builtin_shuffle(a, b, IntVec{((L & S) ? int(kLanes + L) : int(L + S))...});
#endif
  }
}
MFLEX_INLINE void transpose(Vec* square) {
  constexpr auto lanes = std::make_index_sequence<kLanes>{};
  exchange<1>(square, lanes);
  exchange<2>(square, lanes);
  if constexpr (kLanes > 4) exchange<4>(square, lanes);
  if constexpr (kLanes > 8) exchange<8>(square, lanes);
}

// Transposed in blocks of kKeys rows: block b is [depth, kKeys], zeros where rows run out. `lines`
// has room for kLanes rows.
template <typename T>
void pack_transposed(const Rows<T>& rows, int64_t length, int64_t depth, const Turn& turn,
                     float* lines, float* target) {
  const int64_t width = padded(depth);
  for (int64_t i = 0; i < kLanes * width; i += kLanes) at(lines + i) = Vec{};
  for (int64_t first = 0; first < length; first += kLanes) {
    float* block = target + first / kKeys * kKeys * depth + first % kKeys;
    const int64_t count = length - first < kLanes ? length - first : kLanes;
    for (int64_t i = 0; i < count; ++i)
      read_row(rows, first + i, depth, turn, 1.0f, lines + i * width);
    for (int64_t i = count * width; i < kLanes * width; i += kLanes) at(lines + i) = Vec{};
    for (int64_t c = 0; c < depth; c += kLanes) {
      Vec square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) square[i] = at(lines + i * width + c);
      transpose(square);
      const int64_t here = depth - c < kLanes ? depth - c : kLanes;
      for (int64_t i = 0; i < here; ++i) at(block + (c + i) * kKeys) = square[i];
    }
  }
}

// Gradients of a head's rows times `factor`, turned back.
template <typename T>
void unpack_rows(float* source, int64_t width, int64_t length, int64_t depth, const Turn& turn,
                 float factor, T* target, int64_t stride) {
  for (int64_t i = 0; i < length; ++i) {
    float* row = source + i * width;
    if (turn.half > 0) rotate(turn, i, -1.0f, row);
    for (int64_t c = 0; c < depth; ++c) store(target[i * stride + c], row[c] * factor);
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

// Those of them that are no padding: the others' scores are computed, and nothing attends to them.
MFLEX_INLINE int64_t real(int64_t seen, int64_t first, int64_t counted) {
  const int64_t left = counted - first;
  return left >= seen ? seen : left < 0 ? 0 : left;
}

// One kv group of one sample: all query heads of the group, block by block (online softmax).
template <typename T>
void forward(const Attention& p, int64_t sample, int64_t group, float* scratch) {
  const Part<T> part(p, sample, group);
  const int64_t begin = part.begin, count = part.count, start = part.start, length = part.length;
  const int64_t counted = p.keys(sample, length);
  const int64_t depth = p.depth, width = padded(depth);
  float* keys = scratch;                     // [depth, kKeys]
  float* values = keys + kKeys * depth;      // [kKeys, width]
  float* scores = values + kKeys * width;    // [kQueries, kKeys]
  float* lines = scores + kQueries * kKeys;  // [kLanes, width]
  float* queries = lines + kLanes * width;   // [count, width], so is the next
  float* sums = queries + count * width;
  float* highest = sums + count * width;  // [count], so is the next
  float* normalizer = highest + count;
  const int64_t share = p.heads / p.groups;
  for (int64_t head = group * share; head < (group + 1) * share; ++head) {
    pack_rows(p.query<T>(begin, head), count, depth, width, p.turn(begin), p.scale, queries);
    for (int64_t k0 = 0; k0 < length; k0 += kKeys) {
      // Packed for all queries that see them, and still in the cache.
      const int64_t some = length - k0 < kKeys ? length - k0 : kKeys;
      pack_transposed(part.keys.from(k0), some, depth, part.key_turn.from(k0), lines, keys);
      pack_rows(part.values.from(k0), some, depth, width, Turn{}, 1.0f, values);
      const int64_t hidden = p.causal && k0 > start ? k0 - start : 0;  // queries before the keys
      for (int64_t q0 = hidden / kQueries * kQueries; q0 < count; q0 += kQueries) {
        const int64_t rows = count - q0 < kQueries ? count - q0 : kQueries;
        const int64_t seen = visible(p, start + q0 + rows, k0, length), span = padded(seen);
        if (seen == 0) continue;
        multiply(rows, span, depth, queries + q0 * width, width, 1, keys, kKeys, scores, kKeys,
                 false);
        for (int64_t i = 0; i < rows; ++i) {
          float* row = scores + i * kKeys;
          const int64_t valid = real(visible(p, start + q0 + i + 1, k0, length), k0, counted);
          for (int64_t c = valid; c < span; ++c) row[c] = -INFINITY;
          Vec top = Vec{} - INFINITY;
          for (int64_t c = 0; c < span; c += kLanes) top = at(row + c) > top ? at(row + c) : top;
          const float before = k0 == 0 ? -INFINITY : highest[q0 + i];
          const float block = horizontal_max(top), now = block > before ? block : before;
          Vec total{};
          for (int64_t c = 0; c < span; c += kLanes) {
            const Vec e = exponential(at(row + c) - now);
            at(row + c) = e;
            total += e;
          }
          const float shrink = k0 == 0 ? 0.0f : exponential(Vec{} + (before - now))[0];
          normalizer[q0 + i] =
              (k0 == 0 ? 0.0f : normalizer[q0 + i] * shrink) + horizontal_sum(total);
          highest[q0 + i] = now;
          if (k0 != 0 && shrink != 1.0f)
            for (int64_t c = 0; c < width; c += kLanes) at(sums + (q0 + i) * width + c) *= shrink;
          if (p.token_keys != nullptr)
            drop(row, k0, valid, row_key(p.token_keys[begin + q0 + i], p.sites[head]), p.threshold,
                 p.keep_scale);
        }
        multiply(rows, width, seen, scores, kKeys, 1, values, width, sums + q0 * width, width,
                 k0 != 0);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const float factor = 1.0f / normalizer[i];
      T* target = p.output<T>(begin + i, head);
      for (int64_t c = 0; c < depth; ++c) store(target[c], sums[i * width + c] * factor);
      p.lse[head * p.tokens + begin + i] = highest[i] + logf(normalizer[i]);
    }
  }
}

// Gradients of one kv group of one sample; probabilities are computed again from `lse`. Those of
// the keys of a slice are added to what later slices gave them.
template <typename T>
void backward(const Attention& p, int64_t sample, int64_t group, float* scratch) {
  const Part<T> part(p, sample, group);
  const int64_t begin = part.begin, count = part.count, start = part.start, length = part.length;
  const int64_t counted = p.keys(sample, length);
  const int64_t depth = p.depth, width = padded(depth);
  float* keys_t = scratch;                   // [depth, kKeys]
  float* values_t = keys_t + kKeys * depth;  // [depth, kKeys]
  float* keys = values_t + kKeys * depth;    // [kKeys, width]
  float* queries = keys + kKeys * width;     // [count, width], so are the next two
  float* outer = queries + count * width;    // gradient of the output
  float* grad_q = outer + count * width;
  float* scores = grad_q + count * width;     // [kQueries, kKeys]: dropped probabilities
  float* slopes = scores + kQueries * kKeys;  // [kQueries, kKeys]: gradient of the scores
  float* lines = slopes + kQueries * kKeys;   // [kLanes, width]
  float* grad_k = lines + kLanes * width;     // [length, row_width], so is the next
  float* grad_v = grad_k + length * width;
  float* delta = part.cut ? grad_k : grad_v + length * width;  // [count]
  int64_t row_width = width;
  alignas(64) float mask[kKeys];
  if (part.cut) {
    row_width = gradient_width(depth);
    grad_k = p.prefix_dk + group * p.prefix_tokens * row_width;
    grad_v = p.prefix_dv + group * p.prefix_tokens * row_width;
  } else {
    for (int64_t i = 0; i < length * width; i += kLanes) at(grad_k + i) = at(grad_v + i) = Vec{};
  }
  const int64_t share = p.heads / p.groups;
  for (int64_t head = group * share; head < (group + 1) * share; ++head) {
    pack_rows(p.query<T>(begin, head), count, depth, width, p.turn(begin), p.scale, queries);
    pack_rows(p.grad_output<T>(begin, head), count, depth, width, Turn{}, 1.0f, outer);
    for (int64_t i = 0; i < count; ++i) {
      const T* out = p.output<T>(begin + i, head);
      float sum = 0.0f;
      for (int64_t c = 0; c < depth; ++c) sum += load(out[c]) * outer[i * width + c];
      delta[i] = sum;
    }
    for (int64_t i = 0; i < count * width; i += kLanes) at(grad_q + i) = Vec{};
    for (int64_t k0 = 0; k0 < length; k0 += kKeys) {
      const int64_t some = length - k0 < kKeys ? length - k0 : kKeys;
      pack_transposed(part.keys.from(k0), some, depth, part.key_turn.from(k0), lines, keys_t);
      pack_transposed(part.values.from(k0), some, depth, Turn{}, lines, values_t);
      pack_rows(part.keys.from(k0), some, depth, width, part.key_turn.from(k0), 1.0f, keys);
      const int64_t hidden = p.causal && k0 > start ? k0 - start : 0;  // queries before the keys
      for (int64_t q0 = hidden / kQueries * kQueries; q0 < count; q0 += kQueries) {
        const int64_t rows = count - q0 < kQueries ? count - q0 : kQueries;
        const int64_t seen = visible(p, start + q0 + rows, k0, length), span = padded(seen);
        if (seen == 0) continue;
        multiply(rows, span, depth, queries + q0 * width, width, 1, keys_t, kKeys, scores, kKeys,
                 false);
        multiply(rows, span, depth, outer + q0 * width, width, 1, values_t, kKeys, slopes, kKeys,
                 false);
        for (int64_t i = 0; i < rows; ++i) {
          float *row = scores + i * kKeys, *slope = slopes + i * kKeys;
          const int64_t valid = real(visible(p, start + q0 + i + 1, k0, length), k0, counted);
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
                 grad_v + k0 * row_width, row_width, true);
        multiply(seen, width, rows, slopes, 1, kKeys, queries + q0 * width, width,
                 grad_k + k0 * row_width, row_width, true);
        multiply(rows, width, seen, slopes, kKeys, 1, keys, width, grad_q + q0 * width, width,
                 true);
      }
    }
    unpack_rows(grad_q, width, count, depth, p.turn(begin), p.scale, p.grad_query<T>(begin, head),
                p.heads * depth);
  }
  // Of a slice its own rows are complete now.
  unpack_rows(grad_k + start * row_width, row_width, count, depth, p.turn(begin), 1.0f,
              p.grad_key<T>(begin, group), p.groups * depth);
  unpack_rows(grad_v + start * row_width, row_width, count, depth, Turn{}, 1.0f,
              p.grad_value<T>(begin, group), p.groups * depth);
}

void item(const Attention& p, int64_t sample, int64_t group, bool back, float* scratch) {
  if (p.bfloat16) {
    back ? backward<BFloat16>(p, sample, group, scratch)
         : forward<BFloat16>(p, sample, group, scratch);
  } else {
    back ? backward<float>(p, sample, group, scratch) : forward<float>(p, sample, group, scratch);
  }
}
