// Rows of a narrow item over latents (MLA) on Hopper: 8, 16 or 32 rows of Q. As latent_wide.cuh, but transposed, so that
// tensor cores multiply no rows that only pad: S^T = K Q^T [64 tokens, rows] and half of O^T = V^T P^T [v_dim / 2, rows], all
// from shared memory. A thread has tokens (or columns of V) lane / 4 and lane / 4 + 8 of its warp's 16, and of every eight
// rows the pair from 2 (lane % 4) on. latent.cuh says in which order.
#pragma once

#include "../latent_wgmma_ptx.cuh"
#include "latent_ring.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kVDim, int kM>
class LatentNarrowRows {
  using Product = typename Kv::Product;
  using Sizes = LatentSizes<kDim, kVDim>;
  using Memory = LatentMemory<kDim, kVDim>;
  static constexpr int kBlocks = kM / 8, kAccumulators = kM / 2, kTokenSteps = kTokens / 16;

 public:
  // `item`: its number in the look-up; `first_row`: where its rows begin in Q's memory.
  __device__ LatentNarrowRows(const Params& p, Memory& memory, int item, int first_row, int warpgroup)
      : p_(p), memory_(memory), item_(item), q_(memory.q + first_row * kPanelRow), warpgroup_(warpgroup) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) row_max_[i / 2][i % 2] = -INFINITY, sum_[i / 2][i % 2] = 0;
#pragma unroll
    for (int i = 0; i < Sizes::kHalfPanels * kAccumulators; ++i) o_[i / kAccumulators][i % kAccumulators] = 0;
  }

  // Starts the scores of a tile.
  __device__ __forceinline__ void start_scores(const LatentStages& stages) {
    const uint32_t a = panel_descriptor(memory_.tile_address(stages));
    const uint32_t b = panel_descriptor(__shfl_sync(~0u, shared_address(q_), 0));
    start_product_with_k<Sizes>(
        stages, [&](uint32_t offset, bool adds) { wgmma_few<false>(s_, a + offset, b + offset, adds, Product()); });
  }

  // Turns the scores of this warpgroup's tile into weights; the rows' maxima up to the tile before are known.
  __device__ __forceinline__ void weigh(int left, const Item& item) {
    if constexpr (Variant::kCaps) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) cap_score(s_[i], p_);
    }
    hide(left, item.draft);
    float higher[kBlocks][2];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& x = higher[i / 2][i % 2];
      x = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
      if (lane_id() < 4) memory_.maxima[warpgroup_][warp()][row(i)] = x;
    }
    // Behind it nobody reads the rope any more either.
    sync_threads(kWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& x = higher[i / 2][i % 2];
#pragma unroll
      for (int warp = 0; warp < kWarpgroupWarps; ++warp) x = fmaxf(x, memory_.maxima[warpgroup_][warp][row(i)]);
      x = lazy_row_max(row_max_[i / 2][i % 2], x, p_);
    }
    follow(higher, correction_);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const float x = row_max_[i / 2][i % 2];
      // A row that has seen nothing yet keeps weights of zero.
      const float base = x == -INFINITY ? 0 : x * p_.scale_log2;
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        float& s = s_[i / 2 * 4 + i % 2 + half];
        s = exp2_fast(s * p_.scale_log2 - base);
        sum_[i / 2][i % 2] += s;
      }
    }
  }

  // Leaves weights [rows, tokens] and maxima for both warpgroups; for this one they are there then.
  __device__ __forceinline__ void publish(const LatentStages& stages) {
    const uint32_t weights = shared_address(memory_.rope(stages));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      store_transposed(Half<Product>::pack(s_[4 * block], s_[4 * block + 1]),
                       Half<Product>::pack(s_[4 * block + 2], s_[4 * block + 3]), weights, block);
    if (warp() == 0 && lane_id() < 4) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) memory_.row_max[warpgroup_][row(i)] = row_max_[i / 2][i % 2];
    }
    fence_async_proxy();
    sync_threads(kWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
  }

  // Takes what the other warpgroup has left.
  __device__ __forceinline__ void receive(const LatentStages&) {
    float higher[kBlocks][2], correction[kBlocks][2];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) higher[i / 2][i % 2] = memory_.row_max[1 - warpgroup_][row(i)];
    if (follow(higher, correction)) rescale_output(correction);
  }

  __device__ __forceinline__ void start_others_values(const LatentStages& stages) { start_values(stages); }
  // O has to be complete up to the tile before.
  __device__ __forceinline__ void start_own_values(const LatentStages& stages) {
    rescale_output(correction_);
    start_values(stages);
  }

  // Adds up the sums of all warps, and writes this warpgroup's columns: through shared memory, over Q, so that threads store
  // 16 bytes of a row side by side.
  __device__ __forceinline__ void finish() {
    const Results<T, kVDim> results(p_);
    uint8_t* const panels = q_ + warpgroup_ * Sizes::kHalfPanels * kPanelBytes;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& sum = sum_[i / 2][i % 2];
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      if (lane_id() < 4) sums(warpgroup_)[warp() * kSlotRows + row(i)] = sum;
    }
    // Nobody multiplies Q any more either.
    sync_threads(kWideBarrier, kLatentComputing);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const RowTarget targets[2] = {RowTarget(rows().targets[row(2 * block)]),
                                    RowTarget(rows().targets[row(2 * block + 1)])};
      float norm[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = 0;
#pragma unroll
        for (int from = 0; from < kLatentWarpgroups * kWarpgroupWarps; ++from)
          sum += sums(from / kWarpgroupWarps)[from % kWarpgroupWarps * kSlotRows + row(2 * block + i)];
        const float row_max = row_max_[block][i];
        norm[i] = norm_of<Kv>(Variant::kSinks ? sum_with_sink(sum, row_max, targets[i], p_) : sum, p_);
        if (warpgroup_ == 0 && warp() == 0 && lane_id() < 4 && targets[i].used())
          results.store_lse2(targets[i], lse2(row_max, sum, p_));
      }
      // A pair is of two rows, which may go to different places.
      const auto pack = [&](float low, float high) {
        return __byte_perm(results.pack(targets[0], make_float2(low * norm[0], 0)),
                           results.pack(targets[1], make_float2(high * norm[1], 0)), 0x5410);
      };
#pragma unroll
      for (int panel = 0; panel < Sizes::kHalfPanels; ++panel) {
        const float (&o)[kAccumulators] = o_[panel];
        store_transposed(pack(o[4 * block], o[4 * block + 1]), pack(o[4 * block + 2], o[4 * block + 3]),
                         shared_address(panels) + panel * kPanelBytes, block);
      }
    }
    sync_threads(kWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
    constexpr int kChunks = Sizes::kHalfPanels * 8;  // of 16 bytes, of a row
#pragma unroll 2
    for (int i = thread_of<kWarpgroupThreads>(); i < kM * kChunks; i += kWarpgroupThreads) {
      const int at = i / kChunks, chunk = i % kChunks;
      const RowTarget to(rows().targets[at]);
      if (!to.used()) continue;
      results.store_packed(to, warpgroup_ * Sizes::kHalfPanels * kPanelColumns + chunk * 8,
                           *reinterpret_cast<const uint4*>(panels + panel_offset(at, chunk, kPanelBytes)));
    }
  }

 private:
  __device__ const LatentRows<kWarpgroupRows>& rows() const { return memory_.rows[item_ % 2]; }
  __device__ float* sums(int warpgroup) const { return memory_.sums[item_ % 2][warpgroup]; }
  __device__ static int warp() { return thread_of<kWarpgroupThreads>() / kWarpSize; }
  // The row of Q of a thread's i-th column of S^T.
  __device__ static int row(int i) { return i / 2 * 8 + thread_of<4>() * 2 + i % 2; }

  // Stores this warp's 16 numbers of each of a block's rows side by side, in a panel.
  __device__ static void store_transposed(uint32_t low, uint32_t high, uint32_t panel, int block) {
    const unsigned lane = lane_id();
    store_matrices_transposed(low, high, panel + panel_offset(block * 8 + lane % 8, warp() * 2 + lane / 8 % 2, 0));
  }

  // Hides tokens as `Softmax::update` does.
  __device__ __forceinline__ void hide(int valid, int draft) {
    const int token = warp() * 16 + lane_id() / 4;
    if (valid < kTokens) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i)
        if (token + i % 4 / 2 * 8 >= valid) s_[i] = -INFINITY;
    }
    if constexpr (Variant::kMasks) {
      if (draft > 0 && valid - draft < kTokens) {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const uint64_t mask = rows().masks[row(i)];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (hidden_from(mask, token + half * 8 - (valid - draft)) & 1) s_[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
        }
      }
    }
    if constexpr (Variant::kLimits) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const Limits limits(valid, rows().behind[row(i)], p_);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (limits.hide(token + half * 8)) s_[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
      }
    }
  }

  // Makes sums relative to new maxima, where O follows with the `correction`; returns whether there are any. A single branch:
  // with one for each row both warpgroups waited for it in turn.
  __device__ __forceinline__ bool follow(const float (&higher)[kBlocks][2], float (&correction)[kBlocks][2]) {
    bool changes = false;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      correction[i / 2][i % 2] = 1;
      changes |= row_max_[i / 2][i % 2] != higher[i / 2][i % 2];
    }
    if (!__any_sync(~0u, changes)) return false;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float& row_max = row_max_[i / 2][i % 2];
      // Of what nothing was seen yet it is NaN.
      const float factor = exp2_fast((row_max - higher[i / 2][i % 2]) * p_.scale_log2);
      if (row_max != higher[i / 2][i % 2]) correction[i / 2][i % 2] = factor;
      row_max = higher[i / 2][i % 2];
      sum_[i / 2][i % 2] *= correction[i / 2][i % 2];
    }
    return true;
  }

  __device__ __forceinline__ void rescale_output(const float (&correction)[kBlocks][2]) {
    bool changes = false;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) changes |= correction[i / 2][i % 2] != 1;
    if (!__any_sync(~0u, changes)) return;
#pragma unroll
    for (int i = 0; i < Sizes::kHalfPanels * kAccumulators; ++i)
      o_[i / kAccumulators][i % kAccumulators] *= correction[i % kAccumulators / 4][i % 2];
  }

  __device__ __forceinline__ void start_values(const LatentStages& stages) {
    stages.wait_full(warpgroup_);
    fence_async_proxy();
    const uint32_t tile = memory_.tile_address(stages);
    const uint32_t a = panel_descriptor(tile) + descriptor_offset(kPanelBytes) * uint32_t(warpgroup_ * Sizes::kHalfPanels);
    const uint32_t b = panel_descriptor(tile + Sizes::kVPanels * kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int panel = 0; panel < Sizes::kHalfPanels; ++panel)
        wgmma_few<true>(o_[panel], a + descriptor_offset(panel * kPanelBytes + step * 16 * kPanelRow),
                        b + descriptor_offset(step * 32), 1, Product());
    }
    wgmma_commit();
  }

  const Params& p_;
  Memory& memory_;
  const int item_;
  uint8_t* const q_;
  const int warpgroup_;
  float row_max_[kBlocks][2], sum_[kBlocks][2], correction_[kBlocks][2];
  float o_[Sizes::kHalfPanels][kAccumulators], s_[kAccumulators];
};

}  // namespace pat
