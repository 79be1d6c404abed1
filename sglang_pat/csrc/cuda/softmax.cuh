// Online softmax over accumulators of a matrix product, base 2, with masking: `Softmax` for wide items (rows are queries),
// `ColumnSoftmax` for the transposed products of narrow ones. A thread of a warp has, of 16 rows, the rows lane / 4 and
// lane / 4 + 8, and of every eight columns the pair from 2 (lane % 4) on: the same for mma.sync and wgmma.
#pragma once

#include <cmath>

#include "ptx.cuh"
#include "threads.cuh"
#include "visibility.cuh"

namespace pat {

// Lazy rescale, as in FlashAttention-4: row_max follows a row's maximum only when that is ahead by more than this, base 2,
// so O is rarely rescaled. Weights then reach 2^8, well within 16 bits and float32 sums.
constexpr float kSlack = 8;

__device__ __forceinline__ float lazy_row_max(float row_max, float higher, const Params& p) {
  return (higher - row_max) * p.scale_log2 > kSlack ? higher : row_max;
}

__device__ __forceinline__ void cap_score(float& s, const Params& p) {
  s = p.cap - __fdividef(2 * p.cap, 1 + exp2_fast(s * p.cap_exponent));
}

struct Softmax {
  float row_max[2] = {-INFINITY,
                      -INFINITY};  // of each row, lazily (`kSlack`) and before the scale: weights are relative to it
  float sum[2] = {0, 0};           // of this thread's own columns, until `finish`

  // Turns scores S into weights P; `correction` is the factor for O and sum so far. Columns from `valid` on are hidden.
  // With Variant::kMasks, of the last `draft` columns before `valid` those are hidden that the row's `mask_of(half)`
  // excludes. With Variant::kLimits, `behind_of(half)` is the row's `tokens_behind`.
  template <int kBlocks, typename MaskOf, typename BehindOf>
  __device__ __forceinline__ void update(float* s, int valid, int draft, const MaskOf& mask_of, const BehindOf& behind_of,
                                         const Params& p, float (&correction)[2]) {
    if constexpr (Variant::kCaps) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) cap_score(s[i], p);
    }
    if (valid < 8 * kBlocks) {
      const int first = thread_of<4>() * 2;
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i)
        if (first + i / 4 * 8 + i % 2 >= valid) s[i] = -INFINITY;
    }
    if constexpr (Variant::kMasks) {
      if (draft > 0 && valid - draft < 8 * kBlocks) {
        const int first = thread_of<4>() * 2 - (valid - draft);
        const uint64_t hidden[2] = {hidden_from(mask_of(0), first), hidden_from(mask_of(1), first)};
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i)
          if (hidden[i / 2 % 2] >> (i / 4 * 8 + i % 2) & 1) s[i] = -INFINITY;
      }
    }
    if constexpr (Variant::kLimits) {
      const int first = thread_of<4>() * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Limits limits(valid, behind_of(half), p);
        if (!limits.hide_some(8 * kBlocks)) continue;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i)
          if (limits.hide(first + i / 2 * 8 + i % 2)) s[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float higher = row_max[half];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        higher = fmaxf(higher, fmaxf(s[4 * block + 2 * half], s[4 * block + 2 * half + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      higher = lazy_row_max(row_max[half], higher, p);
      // A row that has seen nothing yet keeps weights of zero.
      const float base = higher == -INFINITY ? 0 : higher * p.scale_log2;
      // Exactly 1 if nothing changes: exp2 of a product minus its rounded value would not be.
      correction[half] = row_max[half] == higher ? 1 : exp2_fast(row_max[half] * p.scale_log2 - base);
      row_max[half] = higher;
      float total = 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 4 * block + 2 * half; i < 4 * block + 2 * half + 2; ++i) {
          s[i] = exp2_fast(s[i] * p.scale_log2 - base);
          total += s[i];
        }
      }
      sum[half] = sum[half] * correction[half] + total;
    }
  }

  // Sums over the row's four threads.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
  }
};

// The same for transposed scores S^T: rows are tokens, columns are rows of Q. A thread has columns 2 (lane % 4) and the
// next of each block of eight, and rows lane / 4 and lane / 4 + 8 of 16.
template <int kBlocks>
struct ColumnSoftmax {
  float row_max[kBlocks][2], sum[kBlocks][2];

  __device__ ColumnSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) row_max[i / 2][i % 2] = -INFINITY, sum[i / 2][i % 2] = 0;
  }

  // As `Softmax::update`. The first chunk has `first` valid tokens, the second `second`. With Variant::kMasks,
  // `mask_of(column)` hides some of the last `draft` valid tokens. With Variant::kLimits, and only if `limited`,
  // `behind_of(column)` is the column's `tokens_behind`.
  template <int kChunks, typename MaskOf, typename BehindOf>
  __device__ __forceinline__ void update(float (&s)[kChunks][kBlocks][4], int first, int second, int draft,
                                         const MaskOf& mask_of, bool limited, const BehindOf& behind_of, const Params& p,
                                         float (&correction)[kBlocks][2]) {
    if constexpr (Variant::kCaps) {
#pragma unroll
      for (int i = 0; i < kChunks * kBlocks * 4; ++i) cap_score((&s[0][0][0])[i], p);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int valid = chunk == 0 ? first : second;
      if (valid >= kStepTokens) continue;
      const int row = unsigned(lane_id()) / 4;
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i)
        if (row + i % 4 / 2 * 8 >= valid) s[chunk][i / 4][i % 4] = -INFINITY;
    }
    if constexpr (Variant::kMasks) {
      if (draft > 0 && (kChunks == 2 ? second : first) - draft < kStepTokens) {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const uint64_t mask = mask_of(i / 2 * 8 + thread_of<4>() * 2 + i % 2);
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int valid = chunk == 0 ? first : second;
            const uint64_t hidden = hidden_from(mask, int(unsigned(lane_id()) / 4) - (valid - draft));
            if (hidden & 1) s[chunk][i / 2][i % 2] = -INFINITY;
            if (hidden >> 8 & 1) s[chunk][i / 2][i % 2 + 2] = -INFINITY;
          }
        }
      }
    }
    if constexpr (Variant::kLimits) {
      if (limited) {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const int behind = behind_of(i / 2 * 8 + thread_of<4>() * 2 + i % 2);
#pragma unroll
          for (int j = 0; j < 2 * kChunks; ++j) {
            const int token = int(unsigned(lane_id()) / 4) + j % 2 * 8;
            if (Limits(j < 2 ? first : second, behind, p).hide(token)) s[j / 2][i / 2][j % 2 * 2 + i % 2] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int block = i / 2, which = i % 2;
      float higher = row_max[block][which];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        higher = fmaxf(higher, fmaxf(s[chunk][block][which], s[chunk][block][which + 2]));
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
      higher = lazy_row_max(row_max[block][which], higher, p);
      // A column that has seen nothing yet keeps weights of zero.
      const float base = higher == -INFINITY ? 0 : higher * p.scale_log2;
      // Not exactly 1 as in `Softmax`: that gained nothing here and took registers
      // (benchmarks/notes/kernels-wide.md, "Rescaling").
      correction[block][which] = exp2_fast(row_max[block][which] * p.scale_log2 - base);
      row_max[block][which] = higher;
      float total = 0;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          float& x = s[chunk][block][which + half];
          x = exp2_fast(x * p.scale_log2 - base);
          total += x;
        }
      }
      sum[block][which] = sum[block][which] * correction[block][which] + total;
    }
  }

  // Sums over the tokens, which eight threads share.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) sum[i / 2][i % 2] += __shfl_xor_sync(~0u, sum[i / 2][i % 2], mask);
    }
  }
};

// Factor from weights relative to `row_max` to weights relative to `higher`; 0 if nothing was seen.
__device__ __forceinline__ float weight(float row_max, float higher, const Params& p) {
  return row_max == -INFINITY ? 0 : exp2_fast((row_max - higher) * p.scale_log2);
}

// Multiplies O by the correction of `Softmax::update`, unless it is 1 in the whole warp.
template <int kSize>
__device__ __forceinline__ void rescale(float* o, const float (&correction)[2]) {
  if (!__any_sync(~0u, correction[0] != 1 || correction[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) o[i] *= correction[i / 2 % 2];
}

// Final factor on a row of O: 1 / sum, times V's scale; 0 if nothing was seen.
template <typename Kv>
__device__ __forceinline__ float norm_of(float sum, const Params& p) {
  return sum > 0 ? __fdividef(Kv::kBytes == 1 ? p.v_scale : 1, sum) : 0;
}

// Log-sum-exp of a row, base 2; -inf if nothing was seen.
__device__ __forceinline__ float lse2(float row_max, float sum, const Params& p) {
  return sum > 0 ? row_max * p.scale_log2 + __log2f(sum) : -INFINITY;
}

// P as the left operand of a product over 16 tokens: accumulators of S have that layout already.
template <typename T>
__device__ __forceinline__ void pack_weights(uint32_t (&a)[4], const float* s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::pack(s[2 * i], s[2 * i + 1]);
}

}  // namespace pat
