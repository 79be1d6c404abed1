// Q and O of a narrow item in one warp's registers, in the layout of the transposed products (kv/plain_narrow.cuh), and their
// way out: `write` for an item of one warp, `reduce_team` for a team's. Which KV a warp computes, and how it is loaded, is the
// `Loader`'s.
#pragma once

#include "kv/format.cuh"
#include "narrow_items.cuh"
#include "results.cuh"
#include "softmax.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kVDim, int kM, int kWarps, typename Loader>
class NarrowRows : protected Loader {
 public:
  __device__ NarrowRows(const Params& p, const typename Loader::WorkItems& items, uint8_t* memory,
                        NarrowStatistics<kWarps>& statistics)
      : Loader(p, items, memory, statistics) {}

 protected:
  using Loader::item, Loader::stage, Loader::kKind, Loader::kReadAhead, Loader::statistics_, Loader::items_,
      Loader::memory_, Loader::p_;
  using typename Loader::S;
  static constexpr int kBlocks = kM / 8, kSteps = kDim / 16, kVSteps = kVDim / 16;
  static constexpr bool kIs8Bit = Kv::kBytes == 1;

  // With Variant::kMasks each lane looks up one row of Q and its mask for all lanes: code for several rows, and again for
  // their masks, took small batches 2 % (benchmarks/notes/code-placement.md, "Less code for drafts of 16 rows"). Where Q
  // is loaded an item ahead there are no registers for that.
  static constexpr bool kLooksUpRows = Variant::kMasks && !kReadAhead;

  struct Queries {
    uint32_t pairs[kSteps][kBlocks][2];
    uint64_t mask;  // of row lane % kM, with kLooksUpRows
  };

  // Loads Q as right operand: this thread's row of each block of eight, pairs of columns for each k16 step; zeros in rows
  // that only pad.
  __device__ void load_q(const Item& item, Queries& to) const {
    uint32_t source = kNoSource;  // of row lane % kM
    if constexpr (kLooksUpRows) {
      const int row = int(unsigned(lane_id()) % kM);
      to.mask = ~0ull;
      if (row < item.count * p_.group) {
        const TokenHead at = p_.token_head(query_of(p_, item, p_.query_of(row)), item.first_head + p_.head_of(row));
        source = source_of<T>(p_, at);
        if (item.draft > 0) to.mask = p_.masks[at.token];
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = block * 8 + int(unsigned(lane_id()) / 4);
      bool valid = row < item.count * p_.group;
      const T* q = static_cast<const T*>(p_.q);
      if constexpr (kLooksUpRows) {
        const uint32_t from = __shfl_sync(~0u, source, row);
        valid = from != kNoSource;
        if (valid) q += int64_t(from) * kSourceElements<T>;
      } else if (valid) {
        q = q_row<T>(p_, item, query_of(p_, item, p_.query_of(row)), row);
      }
      const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(q) + thread_of<4>() * (kIs8Bit ? 2 : 1);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to.pairs[step][block][i] =
              valid ? convert_pair<T, typename Kv::Product>(pairs[step * 8 + i * (kIs8Bit ? 1 : 4)]) : 0;
      }
    }
  }

  // The rows of Q whose results this thread has, numbered below kOwnRows.
  static constexpr int kOwnRows = 2 * kBlocks;
  __device__ static int row_of(int number) { return number / 2 * 8 + thread_of<4>() * 2 + number % 2; }

  // The value of such a row; the number comes from a loop that is not unrolled.
  __device__ static float of_row(int number, const float (&values)[kBlocks][2]) {
    float value = values[0][0];
#pragma unroll
    for (int i = 1; i < kOwnRows; ++i) value = number == i ? values[i / 2][i % 2] : value;
    return value;
  }
  // Its O in column `column_of(i)`.
  __device__ float output_of_row(int number, int i) const {
    float value = o_[i / 2][0][i % 2 * 2];
#pragma unroll
    for (int j = 1; j < kOwnRows; ++j) value = number == j ? o_[i / 2][j / 2][i % 2 * 2 + j % 2] : value;
    return value;
  }

  __device__ static int column_of(int i) {
    return kIs8Bit ? i / 2 * 16 + lane_id() / 4 * 2 + i % 2 : i * 8 + lane_id() / 4;
  }

  // Writes the results of an item that one warp ran.
  __device__ void write(const Item& item) const {
    const Results<T, kVDim> results(p_);
    // With 16-bit KV a thread has single columns of two rows, and its neighbour the next columns: an exchange gives each
    // pairs of one row.
    const int odd = kIs8Bit ? 0 : lane_id() / 4 % 2;
#pragma unroll 1
    for (int number = odd; number < kOwnRows; number += kIs8Bit ? 1 : 2) {
      const RowTarget to(p_, item, row_of(number));
      const float sum = of_row(number, softmax_.sum), row_max = of_row(number, softmax_.row_max);
      const float norm = norm_of<Kv>(Variant::kSinks && to.used() ? sum_with_sink(sum, row_max, to, p_) : sum, p_);
      if (to.used() && lane_id() / 4 == odd) results.store_lse2(to, lse2(row_max, sum, p_));
      const auto pair_of = [&](int i) {
        if constexpr (kIs8Bit) {
          return make_float2(output_of_row(number, 2 * i) * norm, output_of_row(number, 2 * i + 1) * norm);
        } else {
          const float even = output_of_row(number & ~1, i), uneven = output_of_row(number | 1, i);
          const float other = __shfl_xor_sync(~0u, odd ? even : uneven, 4);
          return make_float2((odd ? other : even) * norm, (odd ? uneven : other) * norm);
        }
      };
      results.template store_pairs<kIs8Bit ? 16 : 8>(to, column_of(0) - odd, pair_of);
    }
  }

  // Merges the results of a team's warps, each in the stage of its last chunk, where it puts O [kM, v_dim] in float32.
  __device__ void reduce_team(const Item& item, int last) {
    static_assert(kM * panels(kVDim) * kPanelColumns * 4 <= S::kStage);
    static_assert(kWarps / 2 <= kMostTeams, "each team has a barrier");
    const Results<T, kVDim> results(p_);
    const int rows = min(item.count * p_.group, kM);
    const TeamPlace team = items_.place(kKind);
    const int lane = lane_id(), warp = warp_id(), leader = warp - team.warp;
    const auto all_arrived = [&] { sync_threads(kTeamBarrier + kKind * kMostTeams + team.team, team.warps * kWarpSize); };
    float* own = reinterpret_cast<float*>(stage(warp, last));
    __syncwarp();
#pragma unroll 1
    for (int number = 0; number < kOwnRows; ++number) {
      const int row = row_of(number);
      if (row >= rows) continue;
      if (lane / 4 == 0) {
        statistics_.row_max[warp][row] = of_row(number, softmax_.row_max);
        statistics_.sum[warp][row] = of_row(number, softmax_.sum);
      }
#pragma unroll
      for (int i = 0; i < kVDim / 8; ++i) own[place(row, column_of(i))] = output_of_row(number, i);
    }
    if (lane == 0) statistics_.stage[warp] = last;
    all_arrived();
    // One warp a row. Each lane computes the weight of one warp's result.
    static_assert(kWarps <= kWarpSize / 2);
    const int part = lane % (kWarpSize / 2), from = leader + min(part, team.warps - 1);
    const int place_of_part = int(stage(from, statistics_.stage[from]) - memory_);
#pragma unroll 1
    for (int row = team.warp; row < rows; row += team.warps) {
      const RowTarget to(p_, item, row);
      const float own_row_max = statistics_.row_max[from][row];
      float row_max = own_row_max;
#pragma unroll
      for (int mask = kWarpSize / 4; mask > 0; mask /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, mask));
      const float share = part < team.warps ? weight(own_row_max, row_max, p_) : 0;
      float sum = share * statistics_.sum[from][row];
#pragma unroll
      for (int mask = kWarpSize / 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      const float norm = norm_of<Kv>(Variant::kSinks ? sum_with_sink(sum, row_max, to, p_) : sum, p_);
      if (lane == 0) results.store_lse2(to, lse2(row_max, sum, p_));
#pragma unroll 1
      for (int first = 0; first < kVDim; first += 4 * kWarpSize) {
        const int column = min(first + lane * 4, kVDim - 4);
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int i = 0; i < team.warps; ++i) {
          const float scale = __shfl_sync(~0u, share, i) * norm;
          const float* const rows_of_part = reinterpret_cast<const float*>(memory_ + __shfl_sync(~0u, place_of_part, i));
          const float4 x = *reinterpret_cast<const float4*>(rows_of_part + place(row, column));
          total.x += x.x * scale, total.y += x.y * scale, total.z += x.z * scale, total.w += x.w * scale;
        }
        if (first + lane * 4 < kVDim) results.store(to, column, total);
      }
    }
    all_arrived();
  }

  // Eight columns at a time are permuted by the row, so that with 16-bit KV a warp's four pairs of rows have no bank
  // conflicts.
  __device__ static int place(int row, int column) {
    return row * panels(kVDim) * kPanelColumns + (column ^ (row / 2 % 4 * 8));
  }

  ColumnSoftmax<kBlocks> softmax_;
  Queries q_ = {}, next_q_ = {};  // of the item that is computed, and of the next one
  float o_[kVSteps][kBlocks][4] = {};
};

}  // namespace pat
