// Where a row of O goes: to the output for a query with one part, else to the workspace, as a part with its log-sum-exp.
// Consumers of wide and narrow items store through `Results`.
#pragma once

#include <climits>
#include <type_traits>

#include "item.cuh"
#include "softmax.cuh"

namespace pat {

// Destination of a row, in rows of v_dim: of the workspace (code >= 0) or of the output (~code).
class RowTarget {
 public:
  static constexpr int kNone = INT_MIN;

  // Destination of row `row` of the item's tile; kNone for rows that only pad.
  __device__ RowTarget(const Params& p, const Item& item, int row) : code_(kNone) {
    if (row >= item.count * p.group) return;
    const int member = p.query_of(row);
    *this = RowTarget(p, item.first_head + p.head_of(row), query_of(p, item, member), target_of(p, item, member));
  }
  // The same for a head of a query whose batch position and part are known.
  __device__ RowTarget(const Params& p, int head, int query, int target) {
    code_ = target == kDirect ? ~p.output_row(query, head) : target * p.heads + head;
  }
  __device__ explicit RowTarget(int code) : code_(code) {}

  __device__ int code() const { return code_; }
  __device__ bool used() const { return code_ != kNone; }
  __device__ bool direct() const { return code_ < 0; }
  __device__ int64_t row() const { return direct() ? ~code_ : code_; }
  // The query head of an output row.
  __device__ int head(const Params& p) const {
    return int(unsigned(~code_) % unsigned(Variant::kMasks ? p.token_heads : p.heads));
  }

 private:
  int code_;
};

// The softmax sum with the row's sink, if this is its only part; else the merge kernel adds the sink. 0 if the row saw
// nothing.
__device__ __forceinline__ float sum_with_sink(float sum, float row_max, const RowTarget& to, const Params& p) {
  return sum > 0 && to.direct() ? sum + exp2_fast(p.sink(to.head(p)) - row_max * p.scale_log2) : sum;
}

// Stores rows of 16 bits: outputs of type T, and parts as __half, saturated. Parts in float32 make outputs no more exact,
// and parts in bfloat16 less: errors of 2.27, 2.28 and 2.83e-3 (simulated for bfloat16 outputs).
template <typename T, int kVDim>
class Results {
 public:
  __device__ explicit Results(const Params& p) : p_(p) {}

  // Stores column pairs `kApart` apart from `column` on. `pair(i)` is the i-th; it is called for rows that only pad too.
  template <int kApart, typename Pair>
  __device__ __forceinline__ void store_pairs(const RowTarget& to, int column, Pair pair) const {
    uint32_t* const row = reinterpret_cast<uint32_t*>(row_of(to) + column);
#pragma unroll
    for (int i = 0; i < kVDim / kApart; ++i) {
      const uint32_t both = pack(to, pair(i));
      if (to.used()) row[i * kApart / 2] = both;
    }
  }

  __device__ void store(const RowTarget& to, int column, float4 x) const {
    *reinterpret_cast<uint2*>(row_of(to) + column) =
        make_uint2(pack(to, make_float2(x.x, x.y)), pack(to, make_float2(x.z, x.w)));
  }

  // Stores eight columns, packed by `pack`.
  __device__ void store_packed(const RowTarget& to, int column, uint4 x) const {
    *reinterpret_cast<uint4*>(row_of(to) + column) = x;
  }

  // Two columns in the type of the destination.
  static __device__ __forceinline__ uint32_t pack(const RowTarget& to, float2 x) {
    if (std::is_same_v<T, __half> || !to.direct()) return saturated_half_pair(x.x, x.y);
    return Half<T>::pack(x.x, x.y);
  }

  __device__ void store_lse2(const RowTarget& to, float lse2) const {
    if (!to.direct()) p_.lse2[to.row()] = lse2;
  }

 private:
  __device__ uint16_t* row_of(const RowTarget& to) const {
    return static_cast<uint16_t*>(to.direct() ? p_.out : p_.partial) + to.row() * kVDim;
  }
  const Params& p_;
};

}  // namespace pat
