// Online softmax over the accumulators of a matrix product. A thread of a warp holds, of 16 rows, the rows lane / 4 and
// lane / 4 + 8, and of every eight columns the pair 2 (lane % 4): mma.sync and wgmma agree on that.
#pragma once

#include <cmath>

#include "params.cuh"
#include "ptx.cuh"

namespace pat {

struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};  // the greatest score of each row so far, without the scale
  float sum[2] = {0, 0};                  // of this thread's own columns

  // Turns scores into weights, and says by what the weights before are to be multiplied. Columns from `valid` on do not
  // count.
  template <int kBlocks>
  __device__ __forceinline__ void update(float* s, int valid, const Params& p, float (&factor)[2]) {
    if (p.cap > 0) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) s[i] = p.cap - __fdividef(2 * p.cap, 1 + exp2_fast(s[i] * p.cap_exponent));
    }
    if (valid < 8 * kBlocks) {
      const int first = fresh(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i)
        if (first + i / 4 * 8 + i % 2 >= valid) s[i] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float higher = top[half];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        higher = fmaxf(higher, fmaxf(s[4 * block + 2 * half], s[4 * block + 2 * half + 1]));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      // A row without a score so far stays at weights of zero.
      const float base = higher == -INFINITY ? 0 : higher * p.scale_log2;
      factor[half] = exp2_fast(top[half] * p.scale_log2 - base);
      top[half] = higher;
      float total = 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 4 * block + 2 * half; i < 4 * block + 2 * half + 2; ++i) {
          s[i] = exp2_fast(s[i] * p.scale_log2 - base);
          total += s[i];
        }
      }
      sum[half] = sum[half] * factor[half] + total;
    }
  }

  // Sums over the row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
  }
};

// What weights that were taken against `top` count against a higher one; nothing where there was no score at all.
__device__ __forceinline__ float weight(float top, float higher, const Params& p) {
  return top == -INFINITY ? 0 : exp2_fast((top - higher) * p.scale_log2);
}

// Multiplies the output's accumulators by the factors of `Softmax::update`, if any is not one.
template <int kSize>
__device__ __forceinline__ void rescale(float* o, const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) o[i] *= factor[i / 2 % 2];
}

// To base 2.
__device__ __forceinline__ float lse(float top, float sum, const Params& p) {
  return sum > 0 ? top * p.scale_log2 + __log2f(sum) : -INFINITY;
}

// Weights as the left operand of a product over 16 tokens.
template <typename T>
__device__ __forceinline__ void pack_weights(uint32_t (&a)[4], const float* s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::pack(s[2 * i], s[2 * i + 1]);
}

}  // namespace pat
