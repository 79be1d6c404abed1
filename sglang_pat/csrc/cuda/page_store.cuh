// New tokens to the tails of their rows, and pages that become full to their records: the same bytes as csrc/cpu/low_bit.h makes. A CTA has eight
// tokens of one KV head, a warp each; it packs together the pages that these tokens complete.
//
// CTAs run in any order, but only the first page that a request completes in a call reads its row's tail. What later tokens of the request would
// write there is written by that page's CTA, when it has read.
#pragma once

#include <cmath>

#include "low_bit.cuh"
#include "smem.cuh"

namespace pat {

constexpr int kStoreTokens = 8, kStoreThreads = kStoreTokens * kWarpSize;

// Strides are in elements.
struct StoreParams {
  const void *k, *v;      // [tokens, kv_heads, dim], the tokens of each request one behind the other, in order
  void *tail_k, *tail_v;  // [rows, kTokens, kv_heads, dim]
  uint8_t* records;       // [pages, kv_heads, record]
  const int64_t *rows, *seq_lens, *slots;  // of each token; seq_lens count it
  int64_t k_token, k_head, v_token, v_head, tail_row, tail_token, tail_head;
  int tokens, kv_heads, num_rows;
  int64_t num_slots;

  // Not if an index is one that there is not, or the slot is in page 0, which SGLang keeps for padding. Then nothing is written for this token, nor
  // read. In a CUDA graph SGLang pads a batch with row 0, length 1 and slot 0; an idle rank's batch is all padding.
  __device__ bool valid(int i) const {
    return rows[i] >= 0 && rows[i] < num_rows && seq_lens[i] > 0 && slots[i] >= kTokens && slots[i] < num_slots;
  }
  // Whether the token `j` is of the valid token `i`'s request, as many places from it there as here.
  __device__ bool along(int i, int j) const {
    return j >= 0 && j < tokens && rows[j] == rows[i] && seq_lens[j] - seq_lens[i] == j - i && valid(j);
  }
  // In its page.
  __device__ int place(int i) const { return int((seq_lens[i] - 1) % kTokens); }
};

// Parameters of one channel of K in a page, or of one token's V. Codes are those nearest to the parameters as they are kept.
template <int kBits>
struct Quantised {
  static constexpr int kLevels = (1 << kBits) - 1;
  float step, least;
  uint16_t scale, zero;

  // The scale is kept divided by `divisor`.
  template <typename At>
  __device__ Quantised(int count, float divisor, const At& at) {
    float low = INFINITY, high = -INFINITY;
    bool broken = false;
    for (int i = 0; i < count; ++i) {
      const float x = at(i);
      low = x < low ? x : low, high = x > high ? x : high, broken = broken || !(fabsf(x) < INFINITY);
    }
    zero = half_bits(low + 0.0f);  // of -0 and 0 the order would decide
    least = half_float(zero);
    const float range = high - least;
    scale = broken ? 0x7e00 : half_bits((range > 0 ? range : 0) / float(kLevels) / divisor);
    step = half_float(scale) * divisor;
  }
};

template <int kBits>
__device__ __forceinline__ uint32_t code_of(float x, float step, float least) {
  constexpr float kLevels = (1 << kBits) - 1;
  return step > 0 ? uint32_t(fminf(fmaxf(rintf((x - least) / step), 0), kLevels)) : 0;
}

// A page in shared memory, and its parameters.
template <typename T, int kDim>
struct PageToPack {
  static constexpr int kRow = kDim + 2;  // no bank conflicts down a column, nor along rows
  T k[kTokens][kRow], v[kTokens][kRow];
  float key_step[kDim], key_least[kDim], value_step[kTokens], value_least[kTokens];
};

// Parameters and codes of the page in `page`, by all threads.
template <typename T, int kBits, int kDim>
__device__ void pack_page(PageToPack<T, kDim>& page, uint8_t* record) {
  using R = Record<kBits, kDim>;
  const int thread = thread_of_cta();
  uint16_t* const halves = reinterpret_cast<uint16_t*>(record);
  static_assert(kDim + kTokens <= kStoreThreads);
  if (thread < kDim) {
    const int place = thread / 16 % R::kWordSteps * 2 + thread / 8 % 2;
    const Quantised<kBits> own(kTokens, float(1 << kBits * place), [&](int i) { return float(page.k[i][thread]); });
    page.key_step[thread] = own.step, page.key_least[thread] = own.least;
    const int at = R::key_parameter(thread);
    halves[at] = own.scale, halves[R::kKeyZeros / 2 + at] = own.zero;
  } else if (thread < kDim + kTokens) {
    const int token = thread - kDim;
    const Quantised<kBits> own(kDim, 1, [&](int i) { return float(page.v[token][i]); });
    page.value_step[token] = own.step, page.value_least[token] = own.least;
    const int at = R::kValueParameters / 2 + R::value_parameter(token);
    halves[at] = own.scale, halves[at + 1] = own.zero;
  }
  __syncthreads();
  uint32_t *const key_words = reinterpret_cast<uint32_t*>(record + R::kKeyCodes), *const value_words =
                                                                                      reinterpret_cast<uint32_t*>(
                                                                                          record + R::kValueCodes);
#pragma unroll 1
  for (int at = thread; at < R::kCodes / 4; at += kStoreThreads) {
    const int lane = at / R::kUnit % kWarpSize, unit = at / (R::kUnit * kWarpSize);
    const int chunk = unit / R::kUnits, word = unit % R::kUnits * R::kUnit + at % R::kUnit;
    uint32_t keys = 0, values = 0;
#pragma unroll
    for (int place = 0; place < 8 / kBits; ++place) {
      const int step = word * R::kWordSteps + place / 2, upper = 16 * step + 8 * (place % 2);
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        // A half's lower byte is of the first eight tokens, its upper of the others; halves are neighbours along the columns.
        const int first = 16 * chunk + byte % 2 * 8, pair = lane % 4 * 2 + byte / 2, bit = 8 * byte + kBits * place;
        const int token = first + lane / 4, channel = upper + pair;
        keys |= code_of<kBits>(float(page.k[token][channel]), page.key_step[channel], page.key_least[channel]) << bit;
        const int value_token = first + pair, value_channel = upper + lane / 4;
        values |= code_of<kBits>(float(page.v[value_token][value_channel]), page.value_step[value_token],
                                 page.value_least[value_token])
                  << bit;
      }
    }
    key_words[at] = keys, value_words[at] = values;
  }
}

template <typename T, int kBits, int kDim>
__global__ void __launch_bounds__(kStoreThreads) store_tokens(const __grid_constant__ StoreParams p) {
  __shared__ PageToPack<T, kDim> page;
  using R = Record<kBits, kDim>;
  const int head = blockIdx.x % p.kv_heads, first = int(blockIdx.x / p.kv_heads) * kStoreTokens;
  const int warp = warp_id(), lane = lane_id();
  const T *const new_k = static_cast<const T*>(p.k) + head * p.k_head, *const new_v =
                                                                           static_cast<const T*>(p.v) + head * p.v_head;
  T *const tails_k = static_cast<T*>(p.tail_k) + head * p.tail_head, *const tails_v =
                                                                         static_cast<T*>(p.tail_v) + head * p.tail_head;
  const auto to_tail = [&](int i) {
    const int64_t to = p.rows[i] * p.tail_row + p.place(i) * p.tail_token;
    for (int c = lane; c < kDim; c += kWarpSize) {
      tails_k[to + c] = new_k[i * p.k_token + c];
      tails_v[to + c] = new_v[i * p.v_token + c];
    }
  };
  const auto is_last = [&](int i) { return !p.along(i, i + kTokens); };  // of those at its place

  const int own = first + warp;
  if (own < p.tokens && p.valid(own) && is_last(own)) {
    // The page in front of its own, which reads the tail where this token goes.
    const int before = own - p.place(own) - 1;
    const bool is_read = p.along(own, before) && !p.along(own, own - kTokens);
    if (!is_read) to_tail(own);
  }

#pragma unroll 1
  for (int last = first; last < min(first + kStoreTokens, p.tokens); ++last) {
    if (!p.valid(last) || p.place(last) != kTokens - 1) continue;
    const int begin = last - (kTokens - 1);  // where its page's first token is or would be
    const int64_t tail = p.rows[last] * p.tail_row;
    __syncthreads();
#pragma unroll 1
    for (int token = warp; token < kTokens; token += kStoreTokens) {
      const bool is_new = p.along(last, begin + token);
      const T* const k = is_new ? new_k + (begin + token) * p.k_token : tails_k + tail + token * p.tail_token;
      const T* const v = is_new ? new_v + (begin + token) * p.v_token : tails_v + tail + token * p.tail_token;
      for (int c = lane; c < kDim; c += kWarpSize) page.k[token][c] = k[c], page.v[token][c] = v[c];
    }
    __syncthreads();
    pack_page<T, kBits, kDim>(page, p.records + (p.slots[last] / kTokens * p.kv_heads + head) * R::kBytes);
#pragma unroll 1
    for (int token = warp; token < kTokens; token += kStoreTokens) {
      const int later = last + 1 + token;
      if (!p.along(last, begin + token) && p.along(last, later) && is_last(later)) to_tail(later);
    }
  }
}

}  // namespace pat
