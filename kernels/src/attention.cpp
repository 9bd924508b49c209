// Variable-length attention on the CPU, with keyed dropout of the probabilities.
//
// Samples lie one after the other; a token attends to its own sample. Scores exist only as blocks
// of kQueries x kKeys, so memory is linear in the length. One work item is one kv group of one
// sample; items write disjoint outputs, so the result does not depend on the number of threads.
//
// The first sample may be a slice of a longer one: its queries attend to the keys of the sample
// from the beginning, which lie in buffers of their own, and its backward adds to sums of their
// gradients. The keys are turned by their positions here, in float32, so the buffers hold them as
// they came.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "api.h"
#include "dropout_hash.h"
#include "floats.h"
#include "level.h"
#include "parallel.h"

namespace mflex {
namespace {

constexpr int64_t kQueries = 48;  // a multiple of every register tile's rows
constexpr int64_t kKeys = 128;
constexpr int64_t kWidest = 16;               // floats in the widest vector
constexpr int64_t kKept = int64_t{16} << 20;  // floats of scratch memory that a thread keeps

// Columns of a row of gradients in the buffers of a cut sample.
int64_t gradient_width(int64_t depth) {
  return (depth + kWidest - 1) / kWidest * kWidest;
}

// Rows of one head, from the first of a sample on.
template <typename T>
struct Rows {
  const T* first;
  int64_t stride;

  Rows from(int64_t row) const { return {first + row * stride, stride}; }
};

// Rotary tables from the same row on; half is 0 where nothing turns.
struct Turn {
  const float *cosine, *sine;
  int64_t half;

  Turn from(int64_t row) const { return {cosine + row * half, sine + row * half, half}; }
};

struct Attention {
  const void *q, *k, *v, *out, *grad_out;
  void *dq, *dk, *dv;
  float* lse;              // [heads, tokens]
  const int64_t* offsets;  // [samples + 1]
  const int64_t* counted;  // [samples] keys that are no padding; null: all
  int64_t samples, tokens, heads, groups, depth;
  int64_t query_stride, key_stride, value_stride;                 // elements from token to token
  int64_t query_head_stride, key_head_stride, value_head_stride;  // from head to head
  bool causal, bfloat16;
  float scale;
  const float *cosine, *sine;  // [tokens, rotary_half]
  int64_t rotary_half;         // 0 without rotary embedding
  const int64_t* token_keys;   // null without dropout
  const uint64_t* sites;       // [heads]
  uint32_t threshold;
  float keep_scale;
  const void *prefix_k, *prefix_v;  // [prefix_tokens, groups, depth]; null: all samples are whole
  float *prefix_dk, *prefix_dv;     // [groups, prefix_tokens, gradient_width]
  const float *prefix_cosine, *prefix_sine;  // [prefix_tokens, rotary_half]
  int64_t prefix_start, prefix_tokens, key_shift;

  template <typename T>
  Rows<T> query(int64_t token, int64_t head) const {
    return {static_cast<const T*>(q) + token * query_stride + head * query_head_stride,
            query_stride};
  }
  template <typename T>
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(const_cast<void*>(out)) + (token * heads + head) * depth;
  }
  template <typename T>
  Rows<T> grad_output(int64_t token, int64_t head) const {
    return {static_cast<const T*>(grad_out) + (token * heads + head) * depth, heads * depth};
  }
  template <typename T>
  T* grad_query(int64_t token, int64_t head) const {
    return static_cast<T*>(dq) + (token * heads + head) * depth;
  }
  template <typename T>
  T* grad_key(int64_t token, int64_t group) const {
    return static_cast<T*>(dk) + (token * groups + group) * depth;
  }
  template <typename T>
  T* grad_value(int64_t token, int64_t group) const {
    return static_cast<T*>(dv) + (token * groups + group) * depth;
  }
  Turn turn(int64_t token) const {
    return {cosine + token * rotary_half, sine + token * rotary_half, rotary_half};
  }
  // The slice of a cut sample.
  bool cut(int64_t sample) const { return prefix_k != nullptr && sample == 0; }
  // Of a sample's keys those before its padding.
  int64_t keys(int64_t sample, int64_t length) const {
    return counted == nullptr ? length : counted[sample];
  }
  // Tokens whose keys a sample's queries attend to.
  int64_t length(int64_t sample) const {
    return offsets[sample + 1] - offsets[sample] + (cut(sample) ? prefix_start : 0);
  }
};

// One kv group of one sample: its queries, and the keys that they attend to.
template <typename T>
struct Part {
  Part(const Attention& p, int64_t sample, int64_t group)
      : begin(p.offsets[sample]),
        count(p.offsets[sample + 1] - begin),
        length(p.length(sample)),
        start(length - count),
        cut(p.cut(sample)) {
    if (cut) {
      const int64_t stride = p.groups * p.depth;
      keys = {static_cast<const T*>(p.prefix_k) + group * p.depth, stride};
      values = {static_cast<const T*>(p.prefix_v) + group * p.depth, stride};
      key_turn = {p.prefix_cosine, p.prefix_sine, p.rotary_half};
    } else {
      const int64_t row = begin - p.key_shift;
      keys = {static_cast<const T*>(p.k) + row * p.key_stride + group * p.key_head_stride,
              p.key_stride};
      values = {static_cast<const T*>(p.v) + row * p.value_stride + group * p.value_head_stride,
                p.value_stride};
      key_turn = p.turn(begin);
    }
  }

  int64_t begin, count;   // of the queries, among all
  int64_t length, start;  // of the keys; the first query's place among them
  bool cut;
  Rows<T> keys, values;
  Turn key_turn;
};

#define MFLEX_BODY "attention_kernel.inl"
#include "levels.inl"

using Item = void (*)(const Attention&, int64_t, int64_t, bool, float*);

// Floats of scratch memory that a sample needs; an upper bound for each form.
int64_t scratch_floats(const Attention& p, int64_t sample, bool back) {
  const int64_t length = p.length(sample), count = p.offsets[sample + 1] - p.offsets[sample];
  const int64_t width = gradient_width(p.depth);
  const int64_t tiles = 2 * kQueries * kKeys + 3 * kKeys * width + kWidest * width;
  const int64_t gradients = p.cut(sample) ? 0 : 2 * length * width;
  return tiles + (back ? gradients + count * (3 * width + 1) : count * (2 * width + 2));
}

// This thread's scratch memory, kept for its next call: a new one costs a page fault every 4 KiB,
// which is a good part of what a slice of a long sample takes. Large ones are not kept.
std::shared_ptr<float> scratch_of(int64_t floats) {
  thread_local std::shared_ptr<float> kept;
  thread_local int64_t room = 0;
  if (floats <= room) return kept;
  std::shared_ptr<float> made(
      static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)), &std::free);
  if (made != nullptr && floats <= kKept) {
    kept = made;
    room = floats;
  }
  return made;
}

// False if scratch memory could not be had.
bool run(const Attention& p, bool back, int threads) {
  const Item run_item = MFLEX_PICK(item);
  // Longest first, each taken by whichever thread is free.
  std::vector<int64_t> order(p.samples);
  int64_t floats = 0;
  for (int64_t i = 0; i < p.samples; ++i) {
    order[i] = i;
    floats = std::max(floats, scratch_floats(p, i, back));
  }
  const auto work = [&](int64_t s) {
    const int64_t stop = p.length(s), start = stop - (p.offsets[s + 1] - p.offsets[s]);
    return stop * stop - start * start;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return work(a) > work(b); });
  const int64_t items = p.samples * p.groups;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  if (threads <= 0) threads = available_threads();
  parallel_for(std::min<int64_t>(threads, items), 1, threads, [&](int64_t, int64_t) {
    const std::shared_ptr<float> scratch = scratch_of(floats);
    if (scratch == nullptr) {
      failed = true;
      return;
    }
    for (int64_t i; (i = next.fetch_add(1)) < items;)
      run_item(p, order[i / p.groups], i % p.groups, back, scratch.get());
  });
  return !failed;
}

}  // namespace
}  // namespace mflex

// What both passes are told; the Python side has the same fields in the same order.
struct mflex_attention {
  const void *query, *key, *value;  // [tokens, heads or groups, depth], last dimension contiguous
  void* output;                     // [tokens, heads, depth]
  float* lse;                       // [heads, tokens]: log of the sum of exponentials
  const void* grad_output;          // as output; null in the forward pass, so are the next three
  void *grad_query, *grad_key, *grad_value;  // contiguous
  const int64_t* offsets;                    // [samples + 1], first token of each sample
  const int64_t* counted;                    // [samples] keys before the padding; null: no padding
  const float *cosine, *sine;                // [tokens, rotary_half]; null without rotary embedding
  const int64_t* token_keys;                 // [tokens]; null without dropout
  const uint64_t* sites;                     // [heads] key of each head's probabilities
  int64_t samples, tokens, heads, groups, depth;
  int64_t query_stride, key_stride, value_stride;                 // elements from token to token
  int64_t query_head_stride, key_head_stride, value_head_stride;  // elements from head to head
  int64_t rotary_half;  // half the number of channels that are rotated
  // The first sample, where it is a slice: keys and values of the sample [prefix_tokens, groups,
  // depth], of which rows up to the slice's end are used; float32 sums of their gradients [groups,
  // prefix_tokens, depth rounded up to 16], turned, aligned to 64 bytes; rotary tables of all its
  // positions. `query` and what else has `tokens` rows has those of the slice; key and value lack
  // the first `key_shift` rows.
  const void *prefix_key, *prefix_value;
  float *prefix_grad_key, *prefix_grad_value;
  const float *prefix_cosine, *prefix_sine;
  int64_t prefix_start, prefix_tokens, key_shift;
  float scale, keep_scale;  // of the scores; of the probabilities that stay
  uint32_t threshold;       // drop probability times 2^32
  int32_t causal, dtype;    // dtype 0 float32, 1 bfloat16
  int32_t threads;
};

// Forward pass, or the backward pass where grad_output is set. Returns 0, or 1 if
// memory ran out.
MFLEX_API int32_t mflex_attention_run(const mflex_attention* a) {
  mflex::Attention p{};
  p.q = a->query;
  p.k = a->key;
  p.v = a->value;
  p.out = a->output;
  p.grad_out = a->grad_output;
  p.dq = a->grad_query;
  p.dk = a->grad_key;
  p.dv = a->grad_value;
  p.lse = a->lse;
  p.offsets = a->offsets;
  p.counted = a->counted;
  p.samples = a->samples;
  p.tokens = a->tokens;
  p.heads = a->heads;
  p.groups = a->groups;
  p.depth = a->depth;
  p.query_stride = a->query_stride;
  p.key_stride = a->key_stride;
  p.value_stride = a->value_stride;
  p.query_head_stride = a->query_head_stride;
  p.key_head_stride = a->key_head_stride;
  p.value_head_stride = a->value_head_stride;
  p.causal = a->causal != 0;
  p.bfloat16 = a->dtype == 1;
  p.scale = a->scale;
  p.cosine = a->cosine;
  p.sine = a->sine;
  p.rotary_half = a->rotary_half;
  p.token_keys = a->token_keys;
  p.sites = a->sites;
  p.threshold = a->threshold;
  p.keep_scale = a->keep_scale;
  p.prefix_k = a->prefix_key;
  p.prefix_v = a->prefix_value;
  p.prefix_dk = a->prefix_grad_key;
  p.prefix_dv = a->prefix_grad_value;
  p.prefix_cosine = a->prefix_cosine;
  p.prefix_sine = a->prefix_sine;
  p.prefix_start = a->prefix_start;
  p.prefix_tokens = a->prefix_tokens;
  p.key_shift = a->key_shift;
  return mflex::run(p, a->grad_output != nullptr, a->threads) ? 0 : 1;
}
