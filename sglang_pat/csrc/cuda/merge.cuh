// Merge: each output of several parts is their mean, weighted by their LSE (PAT §7). Queries with one part were written
// by forward; rows behind the plan's batch, with which CUDA graphs pad, become zero.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace pat {

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * kWarpSize;

// `kShare` warps of a CTA work on one (query, head).
template <typename T, int kDim, int kShare>
__global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ Params p) {
  constexpr int kVector = kDim % 128 == 0 ? 4 : kDim % 64 == 0 ? 2 : 1, kVectors = kDim / 32 / kVector;
  constexpr int kAtOnce = 4;  // parts in flight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp % kShare;
  const int64_t row = int64_t(blockIdx.x) * (kMergeWarps / kShare) + warp / kShare;
  const int query = int(row / p.heads), head = int(row % p.heads);
  if (query >= p.out_rows) return;
  T* out = static_cast<T*>(p.out) + row * kDim;
  if (query >= p.plan[kBatch]) {
    wait_for_primary();
    if (share == 0)
      for (int i = lane; i < kDim / 2; i += 32) reinterpret_cast<uint32_t*>(out)[i] = 0;
    return;
  }
  const int32_t* offsets = p.plan + p.plan[kPartOffsets];
  const int first = offsets[query], end = offsets[query + 1];
  wait_for_primary();
  if (first == end) return;

  float sum[kDim / 32] = {}, weight = 0, top = -INFINITY;
  for (int part = first + share; part < end; part += kShare * kAtOnce) {
    float x[kAtOnce][kDim / 32], l[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = part + i * kShare;
      l[i] = at < end ? p.lse[int64_t(at) * p.heads + head] : -INFINITY;
      const float* from = p.partial + (int64_t(min(at, end - 1)) * p.heads + head) * kDim;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float* vector = from + (j * 32 + lane) * kVector;
        if constexpr (kVector == 4) {
          reinterpret_cast<float4&>(x[i][j * 4]) = *reinterpret_cast<const float4*>(vector);
        } else if constexpr (kVector == 2) {
          reinterpret_cast<float2&>(x[i][j * 2]) = *reinterpret_cast<const float2*>(vector);
        } else {
          x[i][j] = *vector;
        }
      }
    }
    float higher = top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) higher = fmaxf(higher, l[i]);
    if (higher == -INFINITY) continue;
    const float scale = exp2_fast(top - higher);
    weight *= scale;
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) sum[j] *= scale;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float factor = exp2_fast(l[i] - higher);
      weight += factor;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) sum[j] += factor * x[i][j];
    }
    top = higher;
  }

  if constexpr (kShare > 1) {
    __shared__ float sums[kMergeWarps][kDim], weights[kMergeWarps], tops[kMergeWarps];
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) sums[warp][j * 32 + lane] = sum[j];
    if (lane == 0) weights[warp] = weight, tops[warp] = top;
    __syncthreads();
    if (share != 0) return;
    float higher = top;
#pragma unroll
    for (int i = 1; i < kShare; ++i) higher = fmaxf(higher, tops[warp + i]);
    const float scale = top == -INFINITY ? 0 : exp2_fast(top - higher);
    weight *= scale;
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) sum[j] *= scale;
#pragma unroll
    for (int i = 1; i < kShare; ++i) {
      const float factor = tops[warp + i] == -INFINITY ? 0 : exp2_fast(tops[warp + i] - higher);
      weight += factor * weights[warp + i];
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) sum[j] += factor * sums[warp + i][j * 32 + lane];
    }
  }
  const float norm = weight > 0 ? 1 / weight : 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    T* to = out + (j * 32 + lane) * kVector;
    if constexpr (kVector == 1) {
      *to = T(sum[j] * norm);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; i += 2)
        reinterpret_cast<uint32_t*>(to)[i / 2] =
            Half<T>::pack(sum[j * kVector + i] * norm, sum[j * kVector + i + 1] * norm);
    }
  }
}

}  // namespace pat
