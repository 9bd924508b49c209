// Variable-length attention on the CPU, with keyed dropout of the probabilities.
//
// Samples lie one after the other; a token attends to its own sample. Scores exist only as blocks
// of kQueries x kKeys, so memory is linear in the length. One work item is one kv group of one
// sample; items write disjoint outputs, so the result does not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
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
constexpr int64_t kWidest = 16;  // floats in the widest vector

struct Attention {
  const void *q, *k, *v, *out, *grad_out;
  void *dq, *dk, *dv;
  float* lse;              // [heads, tokens]
  const int64_t* offsets;  // [samples + 1]
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

  template <typename T>
  const T* query(int64_t token, int64_t head) const {
    return static_cast<const T*>(q) + token * query_stride + head * query_head_stride;
  }
  template <typename T>
  const T* key(int64_t token, int64_t group) const {
    return static_cast<const T*>(k) + token * key_stride + group * key_head_stride;
  }
  template <typename T>
  const T* value(int64_t token, int64_t group) const {
    return static_cast<const T*>(v) + token * value_stride + group * value_head_stride;
  }
  template <typename T>
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(const_cast<void*>(out)) + (token * heads + head) * depth;
  }
  template <typename T>
  const T* grad_output(int64_t token, int64_t head) const {
    return static_cast<const T*>(grad_out) + (token * heads + head) * depth;
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
};

#define MFLEX_BODY "attention_kernel.inl"
#include "levels.inl"

using Item = void (*)(const Attention&, int64_t, int64_t, bool, float*);

// Floats of scratch memory that one item of `length` tokens needs; an upper bound for each form.
int64_t scratch_floats(const Attention& p, int64_t length, bool back) {
  const int64_t width = (p.depth + kWidest - 1) / kWidest * kWidest;
  const int64_t blocks = (length + kKeys - 1) / kKeys;
  const int64_t transposed = blocks * kKeys * p.depth;
  const int64_t tiles = 2 * kQueries * kKeys + 2 * kQueries * width;
  return (back ? 2 * transposed + 6 * length * width + length : transposed + length * width) +
         tiles + p.depth + kWidest;
}

// False if scratch memory could not be had.
bool run(const Attention& p, bool back, int threads) {
  const Item run_item = MFLEX_PICK(item);
  // Longest first, each taken by whichever thread is free.
  std::vector<int64_t> order(p.samples);
  for (int64_t i = 0; i < p.samples; ++i) order[i] = i;
  const auto length = [&](int64_t s) { return p.offsets[s + 1] - p.offsets[s]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return length(a) > length(b); });
  const int64_t items = p.samples * p.groups;
  const int64_t floats = items > 0 ? scratch_floats(p, length(order[0]), back) : 0;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  if (threads <= 0) threads = available_threads();
  parallel_for(std::min<int64_t>(threads, items), 1, threads, [&](int64_t, int64_t) {
    std::unique_ptr<float, decltype(&std::free)> scratch(
        static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)), &std::free);
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
  const float *cosine, *sine;                // [tokens, rotary_half]; null without rotary embedding
  const int64_t* token_keys;                 // [tokens]; null without dropout
  const uint64_t* sites;                     // [heads] key of each head's probabilities
  int64_t samples, tokens, heads, groups, depth;
  int64_t query_stride, key_stride, value_stride;                 // elements from token to token
  int64_t query_head_stride, key_head_stride, value_head_stride;  // elements from head to head
  int64_t rotary_half;      // half the number of channels that are rotated
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
  return mflex::run(p, a->grad_output != nullptr, a->threads) ? 0 : 1;
}
