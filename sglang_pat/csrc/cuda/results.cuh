// Where a work item's results go: the output for a query that has no other part, the workspace else.
#pragma once

#include "softmax.cuh"

namespace pat {

template <typename T, int kDim>
class Results {
 public:
  // `queries` and `targets` are the item's batch positions and workspace slots.
  __device__ Results(const Params& p, const int* queries, const int* targets, int count, int kv_head)
      : p_(p), queries_(queries), targets_(targets), rows_(count * p.group), kv_head_(kv_head) {}

  __device__ int rows() const { return rows_; }

  // Row `row` of the tile: where it is in the output or the workspace, if it is any query's.
  struct Row {
    bool used, direct;
    int64_t at;
  };
  __device__ Row row(int row) const {
    if (row >= rows_) return Row{false, false, 0};
    const int query = p_.query_of(row), target = targets_[query];
    const bool direct = target == kDirect;
    return Row{true, direct, int64_t(direct ? queries_[query] : target) * p_.heads + kv_head_ * p_.group + p_.head_of(row)};
  }

  __device__ void store(const Row& row, int column, float x, float y) const {
    if (!row.used) return;
    if (row.direct)
      *reinterpret_cast<uint32_t*>(static_cast<T*>(p_.out) + row.at * kDim + column) = Half<T>::pack(x, y);
    else
      *reinterpret_cast<float2*>(p_.partial + row.at * kDim + column) = make_float2(x, y);
  }

  __device__ void store(const Row& row, int column, float4 x) const {
    if (!row.used) return;
    if (row.direct)
      *reinterpret_cast<uint2*>(static_cast<T*>(p_.out) + row.at * kDim + column) =
          make_uint2(Half<T>::pack(x.x, x.y), Half<T>::pack(x.z, x.w));
    else
      *reinterpret_cast<float4*>(p_.partial + row.at * kDim + column) = x;
  }

  __device__ void store_lse(const Row& row, float lse) const {
    if (row.used && !row.direct) p_.lse[row.at] = lse;
  }

 private:
  const Params& p_;
  const int *queries_, *targets_;
  const int rows_, kv_head_;
};

// Writes the accumulators of one warp: rows `row` and `row` + 8 of the tile are this thread's.
template <typename T, int kDim, typename Softmax>
__device__ __forceinline__ void write_fragments(const Results<T, kDim>& results, int row, const Softmax& softmax,
                                                const float* o, const Params& p) {
  const int pair = fresh(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto to = results.row(row + half * 8);
    if (!to.used) continue;
    const float sum = softmax.sum[half], norm = sum > 0 ? 1 / sum : 0;
    if (pair == 0) results.store_lse(to, lse(softmax.top[half], sum, p));
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) results.store(to, i * 8 + pair, o[4 * i + 2 * half] * norm, o[4 * i + 2 * half + 1] * norm);
  }
}

}  // namespace pat
