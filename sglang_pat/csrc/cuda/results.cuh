// Where a work item's results go: the output for a query that has no other part, the workspace else.
#pragma once

#include <climits>

#include "items.cuh"
#include "softmax.cuh"

namespace pat {

// Where one row of a tile goes, in rows of V's dimension: of the workspace, or of the output.
class RowTarget {
 public:
  static constexpr int kNone = INT_MIN;

  // Row `row` of the item's tile; only rows that are a query's are used.
  __device__ RowTarget(const Params& p, const Item& item, int row) : code_(kNone) {
    if (row >= item.count * p.group) return;
    const int member = p.query_of(row);
    *this = RowTarget(p, item, row, query_of(p, item, member), target_of(p, item, member));
  }
  // The same, of a row that is a query's, whose batch position and part's place are known.
  __device__ RowTarget(const Params& p, const Item& item, int row, int query, int target) {
    const int head = item.first_head + p.head_of(row);
    code_ = target == kDirect ? ~p.output_row(query, head) : target * p.heads + head;
  }
  __device__ explicit RowTarget(int code) : code_(code) {}

  __device__ int code() const { return code_; }
  __device__ bool used() const { return code_ != kNone; }
  __device__ bool direct() const { return code_ < 0; }
  __device__ int64_t row() const { return direct() ? ~code_ : code_; }
  // Of an output.
  __device__ int head(const Params& p) const { return int(unsigned(~code_) % unsigned(kMasks ? p.token_heads : p.heads)); }

 private:
  int code_;
};

// The sum of a row's weights, with its sink's where the row has no other part; the others have it in the merge. Nothing where it
// has no weight at all.
__device__ __forceinline__ float sum_with_sink(float sum, float row_max, const RowTarget& to, const Params& p) {
  return sum > 0 && to.direct() ? sum + exp2_fast(p.sink(to.head(p)) - row_max * p.scale_log2) : sum;
}

template <typename T, int kVDim>
class Results {
 public:
  __device__ explicit Results(const Params& p) : p_(p) {}

  // Pairs of columns `kApart` apart from `column` on: `pair(i)` is the i-th.
  template <int kApart, typename Pair>
  __device__ __forceinline__ void store_pairs(const RowTarget& to, int column, Pair pair) const {
    if (to.direct()) {
      uint32_t* out = reinterpret_cast<uint32_t*>(direct(to) + column);
#pragma unroll
      for (int i = 0; i < kVDim / kApart; ++i) {
        const float2 x = pair(i);
        out[i * kApart / 2] = Half<T>::pack(x.x, x.y);
      }
    } else {
      float2* out = reinterpret_cast<float2*>(partial(to) + column);
#pragma unroll
      for (int i = 0; i < kVDim / kApart; ++i) out[i * kApart / 2] = pair(i);
    }
  }

  // Columns 8 apart from `column` on: `one(i)` is the i-th.
  template <typename One>
  __device__ __forceinline__ void store_columns(const RowTarget& to, int column, One one) const {
    if (to.direct()) {
      T* out = direct(to) + column;
#pragma unroll
      for (int i = 0; i < kVDim / 8; ++i) out[i * 8] = T(one(i));
    } else {
      float* out = partial(to) + column;
#pragma unroll
      for (int i = 0; i < kVDim / 8; ++i) out[i * 8] = one(i);
    }
  }

  __device__ void store(const RowTarget& to, int column, float4 x) const {
    if (to.direct())
      *reinterpret_cast<uint2*>(direct(to) + column) = make_uint2(Half<T>::pack(x.x, x.y), Half<T>::pack(x.z, x.w));
    else
      *reinterpret_cast<float4*>(partial(to) + column) = x;
  }

  __device__ void store_lse2(const RowTarget& to, float lse2) const {
    if (!to.direct()) p_.lse2[to.row()] = lse2;
  }

 private:
  __device__ T* direct(const RowTarget& to) const { return static_cast<T*>(p_.out) + to.row() * kVDim; }
  __device__ float* partial(const RowTarget& to) const { return p_.partial + to.row() * kVDim; }

  const Params& p_;
};

}  // namespace pat
