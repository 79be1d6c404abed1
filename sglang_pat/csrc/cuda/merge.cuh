// The merge kernel: out[query, head] = mean of its parts in the workspace, weighted by their log-sum-exp (PAT section 7).
// Queries with one part were written by forward. Rows beyond the plan's batch, which CUDA graphs pad with, become zero.
// module.cu launches it behind forward, by programmatic dependent launch.
#pragma once

#include "params.cuh"
#include "ptx.cuh"
#include "threads.cuh"

namespace pat {

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * kWarpSize;

// The columns of a row that a thread has: vectors of up to 8 bytes, so that a warp reads a row in one piece.
template <int kVDim>
struct MergeColumns {
  static_assert(kVDim % kWarpSize == 0);
  static constexpr int kVector = kVDim % 128 == 0 ? 4 : kVDim % 64 == 0 ? 2 : 1, kVectors = kVDim / kWarpSize / kVector;
  static constexpr int kCount = kVDim / kWarpSize;

  static __device__ __forceinline__ void load(float (&x)[kCount], const __half* row) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const __half* from = row + (i * kWarpSize + lane_id()) * kVector;
      if constexpr (kVector == 4) {
        const uint2 four = *reinterpret_cast<const uint2*>(from);
        to_floats(x + i * 4, four.x), to_floats(x + i * 4 + 2, four.y);
      } else if constexpr (kVector == 2) {
        to_floats(x + i * 2, *reinterpret_cast<const uint32_t*>(from));
      } else {
        x[i] = __half2float(*from);
      }
    }
  }

  template <typename T>
  static __device__ __forceinline__ void store(T* row, const float (&x)[kCount], float scale) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      T* to = row + (i * kWarpSize + lane_id()) * kVector;
      if constexpr (kVector == 1) {
        *to = T(x[i] * scale);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; j += 2)
          reinterpret_cast<uint32_t*>(to)[j / 2] =
              Half<T>::pack(x[i * kVector + j] * scale, x[i * kVector + j + 1] * scale);
      }
    }
  }

 private:
  static __device__ __forceinline__ void to_floats(float* x, uint32_t pair) {
    const float2 both = pat::to_floats(pair);
    x[0] = both.x, x[1] = both.y;
  }
};

// A row merged so far.
template <int kVDim>
struct MergeSum {
  float x[kVDim / kWarpSize] = {}, weight = 0, max_lse2 = -INFINITY;

  // Makes sums relative to a new maximum.
  __device__ __forceinline__ void rescale_to(float higher) {
    const float correction = max_lse2 == -INFINITY ? 0 : exp2_fast(max_lse2 - higher);
    weight *= correction;
#pragma unroll
    for (int i = 0; i < kVDim / kWarpSize; ++i) x[i] *= correction;
    max_lse2 = higher;
  }

  __device__ __forceinline__ void add(const float (&other)[kVDim / kWarpSize], float lse2, float other_weight) {
    const float correction = lse2 == -INFINITY ? 0 : exp2_fast(lse2 - max_lse2);
    weight += correction * other_weight;
#pragma unroll
    for (int i = 0; i < kVDim / kWarpSize; ++i) {
      // What a part lacks nobody has written: it may be NaN. No branch, which loads would wait for.
      x[i] += correction * (Variant::kStraddles && lse2 == -INFINITY ? 0 : other[i]);
    }
  }
};

// With few outputs (kFew) a CTA merges one, and its warps divide the parts. With many, a warp merges `kRows` heads of a
// query.
template <typename T, int kVDim, bool kFew, int kRows>
__global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ Params p) {
  using Columns = MergeColumns<kVDim>;
  constexpr int kShare = kFew ? kMergeWarps : 1, kAtOnce = kRows == 1 ? 4 : 2;  // parts in flight
  const int warp = warp_id(), share = kFew ? warp : 0;
  const int64_t row = int64_t(kFew ? blockIdx.x : blockIdx.x * kMergeWarps + warp) * kRows;
  const int query = int(row / p.heads), head = int(row % p.heads);
  if (query >= p.queries) return;
  const auto out = [&](int j) {
    return static_cast<T*>(p.out) + (Variant::kMasks ? p.output_row(query, head + j) : row + j) * kVDim;
  };
  if (query >= p.plan[kBatch]) {
    wait_for_primary();
    if (share != 0) return;
    for (int j = 0; j < kRows; ++j)
      for (int i = lane_id(); i < kVDim / 2; i += kWarpSize) reinterpret_cast<uint32_t*>(out(j))[i] = 0;
    return;
  }
  const int32_t* offsets = p.section(kPartOffsets);
  const int first = offsets[query], end = offsets[query + 1];
  // Which rows each part has, where queries may straddle work items (packing/layout.py).
  [[maybe_unused]] const int32_t* part_rows = nullptr;
  if constexpr (Variant::kStraddles) {
    if (p.plan[kSize] > p.plan[kPartOffsets] + p.plan[kBatch] + 1) part_rows = offsets + p.plan[kBatch] + 1;
  }
  [[maybe_unused]] const auto lacks = [&](int32_t rows, int j) {
    const int row = (head + j) % p.group;
    return row < (rows & ((1 << kPartEndShift) - 1)) || row >= rows >> kPartEndShift;
  };
  wait_for_primary();
  if (first == end) return;

  MergeSum<kVDim> sums[kRows];
  for (int part = first + share; part < end; part += kShare * kAtOnce) {
    float x[kAtOnce][kRows][Columns::kCount], lse2[kAtOnce][kRows];
    [[maybe_unused]] int32_t rows[kAtOnce];
#pragma unroll
    for (int i = 0; Variant::kStraddles && i < kAtOnce; ++i)
      rows[i] = part_rows != nullptr ? part_rows[min(part + i * kShare, end - 1)] : kAllRows;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = part + i * kShare;
      const int64_t from = int64_t(min(at, end - 1)) * p.heads + head;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        lse2[i][j] = at < end ? p.lse2[from + j] : -INFINITY;
        if constexpr (Variant::kStraddles) lse2[i][j] = lacks(rows[i], j) ? -INFINITY : lse2[i][j];
        Columns::load(x[i][j], p.partial + (from + j) * kVDim);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float higher = sums[j].max_lse2;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) higher = fmaxf(higher, lse2[i][j]);
      sums[j].rescale_to(higher);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[j].add(x[i][j], lse2[i][j], 1);
    }
  }

  if constexpr (kFew) {
    static_assert(kRows == 1);
    __shared__ MergeSum<kVDim> all[kMergeWarps][kWarpSize];
    all[warp][lane_id()] = sums[0];
    __syncthreads();
    if (share != 0) return;
    float higher = sums[0].max_lse2;
#pragma unroll
    for (int i = 1; i < kMergeWarps; ++i) higher = fmaxf(higher, all[i][lane_id()].max_lse2);
    sums[0].rescale_to(higher);
#pragma unroll
    for (int i = 1; i < kMergeWarps; ++i) {
      const MergeSum<kVDim> other = all[i][lane_id()];
      sums[0].add(other.x, other.max_lse2, other.weight);
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    float weight = sums[j].weight;
    if constexpr (Variant::kSinks) {
      if (weight > 0) weight += exp2_fast(p.sink(p.token_head(query, head + j).head) - sums[j].max_lse2);
    }
    Columns::store(out(j), sums[j].x, weight > 0 ? 1 / weight : 0);
  }
}

}  // namespace pat
