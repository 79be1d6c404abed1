// Where a work item's results go: the output for a query that has no other part, the workspace else.
#pragma once

#include "items.cuh"
#include "softmax.cuh"

namespace pat {

template <typename T, int kDim>
class Results {
 public:
  __device__ Results(const Params& p, const Item& item) : p_(p), item_(item) {}

  __device__ int rows() const { return item_.count * p_.group; }

  // Row `row` of the tile: where it is in the output or the workspace. Only rows that are a query's, `used`, are stored.
  struct Row {
    bool used, direct;
    int64_t at;
  };
  __device__ Row row(int row) const {
    if (row >= rows()) return Row{false, false, 0};
    int member = p_.query_of(row), query = item_.query, target = item_.target;
    if (member != 0) {  // the first one was looked up with the item
      query = p_.section(kQueries)[item_.first + member];
      target = p_.section(kSlots)[item_.first + member];
    }
    const bool direct = target == kDirect;
    return Row{true, direct, int64_t(direct ? query : target) * p_.heads + item_.head * p_.group + p_.head_of(row)};
  }

  // Pairs of columns 8 apart from `column` on: `pair(i)` is the i-th.
  template <typename Pair>
  __device__ __forceinline__ void store_row(const Row& row, int column, Pair pair) const {
    if (row.direct) {
      uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<T*>(p_.out) + row.at * kDim + column);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const float2 x = pair(i);
        to[i * 4] = Half<T>::pack(x.x, x.y);
      }
    } else {
      float2* to = reinterpret_cast<float2*>(p_.partial + row.at * kDim + column);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) to[i * 4] = pair(i);
    }
  }

  __device__ void store(const Row& row, int column, float4 x) const {
    if (row.direct)
      *reinterpret_cast<uint2*>(static_cast<T*>(p_.out) + row.at * kDim + column) =
          make_uint2(Half<T>::pack(x.x, x.y), Half<T>::pack(x.z, x.w));
    else
      *reinterpret_cast<float4*>(p_.partial + row.at * kDim + column) = x;
  }

  __device__ void store_lse(const Row& row, float lse) const {
    if (!row.direct) p_.lse[row.at] = lse;
  }

 private:
  const Params& p_;
  const Item& item_;
};

// Writes the accumulators of one warp: rows `row` and `row` + 8 of the tile are this thread's.
template <typename T, int kDim>
__device__ __forceinline__ void write_fragments(const Results<T, kDim>& results, int row, const Softmax& softmax,
                                                const float* o, const Params& p) {
  const int pair = fresh(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto to = results.row(row + half * 8);
    if (!to.used) continue;
    const float sum = softmax.sum[half], norm = sum > 0 ? 1 / sum : 0;
    if (pair == 0) results.store_lse(to, lse(softmax.top[half], sum, p));
    results.store_row(to, pair,
                      [&](int i) { return make_float2(o[4 * i + 2 * half] * norm, o[4 * i + 2 * half + 1] * norm); });
  }
}

}  // namespace pat
