// New tokens to the tails of their rows, and pages that become full to their records: the same bytes as csrc/cpu/low_bit.h makes. A CTA has K or V of
// eight tokens of one KV head, a warp each; it packs together the pages that these tokens complete. Most of a page's time is waiting for memory and
// dividing: all threads look up, load and divide at once.
//
// CTAs run in any order, but only the first page that a request completes in a call reads its row's tail. What later tokens of the request would
// write there is written by that page's CTA, when it has read.
#pragma once

#include <cmath>

#include "page_record.cuh"

#include "../../fit.h"

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
  // Whether the token `j` is of the valid token `i`'s request, as far from it there as here.
  __device__ bool along(int i, int j) const {
    return j >= 0 && j < tokens && rows[j] == rows[i] && seq_lens[j] - seq_lens[i] == j - i && valid(j);
  }
  __device__ int index_in_page(int i) const { return int((seq_lens[i] - 1) % kTokens); }
};

// Parameters of one channel of K in a page, or of one token's V, by `kShare` neighbouring threads, of which this one is `part`. Codes are those nearest
// to the parameters as they are kept.
template <int kBits>
struct Quantised : Scaled {
  static constexpr int kLevels = (1 << kBits) - 1;

  // The scale is kept divided by `divisor`.
  template <int kCount, int kShare, typename At>
  static __device__ Quantised of(int part, float divisor, const At& at) {
    float low = INFINITY, high = -INFINITY;
    bool broken = false;
#pragma unroll 8
    for (int i = part; i < kCount; i += kShare) {
      const float x = at(i);
      low = x < low ? x : low, high = x > high ? x : high, broken = broken || !(fabsf(x) < INFINITY);
    }
#pragma unroll
    for (int mask = 1; mask < kShare; mask *= 2) {
      const float lower = __shfl_xor_sync(~0u, low, mask), upper = __shfl_xor_sync(~0u, high, mask);
      low = lower < low ? lower : low, high = upper > high ? upper : high;
      broken = __shfl_xor_sync(~0u, int(broken), mask) || broken;
    }
    Quantised own;
    own.zero = half_bits(low + 0.0f);  // of -0 and 0 the order would decide
    own.least = half_float(own.zero);
    const float range = high - own.least;
    own.scale = broken ? 0x7e00 : half_bits((range > 0 ? range : 0) / float(kLevels) / divisor);
    own.step = half_float(own.scale) * divisor;
    if constexpr (kBits == 2) {
#pragma unroll 1
      for (int round = 0; round < kFits; ++round) own.template fit_to<kCount, kShare>(part, divisor, at);
    }
    return own;
  }

  static __device__ __forceinline__ uint32_t code_of(float x, float step, float least) {
    return step > 0 ? uint32_t(fminf(fmaxf(rintf((x - least) / step), 0), float(kLevels))) : 0;
  }

 private:
  // As in csrc/cpu/low_bit.h, sums in the same order: a thread has those of every fourth number, one or several of them.
  template <int kCount, int kShare, typename At>
  __device__ void fit_to(int part, float divisor, const At& at) {
    static_assert(kFitSums % kShare == 0 && kCount % kFitSums == 0);
    constexpr int kOwn = kFitSums / kShare;
    const float inverse = step > 0 ? 1 / step : 0;
    float codes = 0, squares = 0, distances[kOwn] = {}, products[kOwn] = {};
#pragma unroll 4
    for (int i = part; i < kCount; i += kFitSums) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float distance = at(i + j * kShare) - least;
        const float code = fminf(fmaxf(rintf(distance * inverse), 0), float(kLevels));
        codes += code, squares += code * code, distances[j] += distance;
        products[j] = fmaf(code, distance, products[j]);
      }
    }
#pragma unroll
    for (int mask = 1; mask < kShare; mask *= 2) {
      const auto add = [&](float& x) { x += __shfl_xor_sync(~0u, x, mask); };
      add(codes), add(squares);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) add(distances[j]), add(products[j]);
    }
    float all = distances[0], product = products[0];
#pragma unroll
    for (int j = 1; j < kOwn; ++j) all += distances[j], product += products[j];
    fit(kCount, codes, squares, all, product, divisor);
  }
};

// K or V of a page in shared memory; its parameters are of channels of K, or of tokens of V.
template <typename T, int kDim>
struct PageToPack {
  static constexpr int kRow = kDim + 2;  // no bank conflicts down a column, nor along rows
  static constexpr int kMost = kDim > kTokens ? kDim : kTokens;
  T numbers[kTokens][kRow];
  float step[kMost], least[kMost];
};

// Parameters and codes of the page in `page`, by all threads.
template <bool kValues, typename T, int kBits, int kDim>
__device__ void pack_page(PageToPack<T, kDim>& page, uint8_t* record) {
  using R = Record<kBits, kDim>;
  using Q = Quantised<kBits>;
  constexpr int kOwners = kValues ? kTokens : kDim, kCount = kValues ? kDim : kTokens, kShare = kStoreThreads / kOwners;
  static_assert(kShare * kOwners == kStoreThreads && kShare <= kWarpSize);
  const int thread = thread_of_cta(), owner = thread / kShare, part = thread % kShare;
  const Q own = Q::template of<kCount, kShare>(part, kValues ? 1 : float(1 << kBits * R::field_of(owner)), [&](int i) {
    return float(kValues ? page.numbers[owner][i] : page.numbers[i][owner]);
  });
  if (part == 0) {
    page.step[owner] = own.step, page.least[owner] = own.least;
    const int at = kValues ? R::kValueParameters / 2 + R::value_parameter(owner) : R::key_parameter(owner);
    uint16_t* const halves = reinterpret_cast<uint16_t*>(record);
    halves[at] = own.scale, halves[at + (kValues ? 1 : R::kKeyZeros / 2)] = own.zero;
  }
  __syncthreads();
  uint32_t* const words = reinterpret_cast<uint32_t*>(record + (kValues ? R::kValueCodes : R::kKeyCodes));
#pragma unroll 1
  for (int at = thread; at < R::kCodes / 4; at += kStoreThreads) {
    const auto word = R::word_at(at);
    uint32_t codes = 0;
#pragma unroll
    for (int field = 0; field < R::kFields; ++field) {
      const int eight = 16 * (word.step + field / 2) + 8 * (field % 2);  // the first channel of these
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int upper = byte % 2, neighbour = byte / 2, column = word.lane % 4 * 2 + neighbour, row = word.lane / 4;
        const int token = 16 * word.chunk + 8 * upper + (kValues ? column : row),
                  channel = eight + (kValues ? row : column);
        const int owner = kValues ? token : channel;
        const float x = float(page.numbers[token][channel]);
        codes |= Q::code_of(x, page.step[owner], page.least[owner]) << R::bit_of(8 * upper, neighbour, field);
      }
    }
    words[at] = codes;
  }
}

template <typename T, int kBits, int kDim>
__global__ void __launch_bounds__(kStoreThreads) store_tokens(const __grid_constant__ StoreParams p) {
  __shared__ PageToPack<T, kDim> page;
  using R = Record<kBits, kDim>;
  const bool of_values = blockIdx.x % 2;
  const int cta = int(blockIdx.x / 2), head = cta % p.kv_heads, first = cta / p.kv_heads * kStoreTokens;
  const int warp = warp_id(), lane = lane_id();
  const T* const fresh = static_cast<const T*>(of_values ? p.v : p.k) + head * (of_values ? p.v_head : p.k_head);
  const int64_t fresh_token = of_values ? p.v_token : p.k_token;
  T* const tails = static_cast<T*>(of_values ? p.tail_v : p.tail_k) + head * p.tail_head;
  const auto to_tail = [&](int i) {
    T* const to = tails + p.rows[i] * p.tail_row + p.index_in_page(i) * p.tail_token;
#pragma unroll
    for (int c = lane; c < kDim; c += kWarpSize) to[c] = fresh[i * fresh_token + c];
  };
  // Of its request's tokens with the same index in a page.
  const auto is_last = [&](int i) { return !p.along(i, i + kTokens); };

  const int own = first + warp;
  if (own < p.tokens && p.valid(own) && is_last(own)) {
    // The page in front of its own, which reads the tail where this token goes.
    const int before = own - p.index_in_page(own) - 1;
    const bool is_read = p.along(own, before) && !p.along(own, own - kTokens);
    if (!is_read) to_tail(own);
  }

  const int candidate = first + lane;
  uint32_t complete = __ballot_sync(
      ~0u, lane < kStoreTokens && candidate < p.tokens && p.valid(candidate) && p.index_in_page(candidate) == kTokens - 1);
#pragma unroll 1
  for (; complete != 0; complete &= complete - 1) {
    const int last = first + __ffs(int(complete)) - 1,
              begin = last - (kTokens - 1);  // where its page's first token is or would be
    const int64_t tail = p.rows[last] * p.tail_row;
    // A warp has every eighth token of the page, and a lane looks up one of them.
    constexpr int kOwn = kTokens / kStoreTokens;
    const auto token_of = [&](int j) { return warp + j * kStoreTokens; };
    const bool looks_up = lane < kOwn;
    const uint32_t is_new = __ballot_sync(~0u, looks_up && p.along(last, begin + token_of(lane)));
    T numbers[kOwn][kDim / kWarpSize];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const T* const from =
          is_new >> j & 1 ? fresh + (begin + token_of(j)) * fresh_token : tails + tail + token_of(j) * p.tail_token;
#pragma unroll
      for (int c = 0; c < kDim / kWarpSize; ++c) numbers[j][c] = from[c * kWarpSize + lane];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
#pragma unroll
      for (int c = 0; c < kDim / kWarpSize; ++c) page.numbers[token_of(j)][c * kWarpSize + lane] = numbers[j][c];
    __syncthreads();
    uint8_t* const record = p.records + (p.slots[last] / kTokens * p.kv_heads + head) * R::kBytes;
    if (of_values)
      pack_page<true, T, kBits, kDim>(page, record);
    else
      pack_page<false, T, kBits, kDim>(page, record);
    const int later = last + 1 + token_of(lane);
    uint32_t waiting = __ballot_sync(~0u, looks_up && !(is_new >> lane & 1) && p.along(last, later) && is_last(later));
#pragma unroll 1
    for (; waiting != 0; waiting &= waiting - 1) to_tail(last + 1 + token_of(__ffs(int(waiting)) - 1));
  }
}

}  // namespace pat
