// Rows of a wide item over latents (MLA) on Hopper: 64 rows of Q, KV tiles of 64 tokens. A warpgroup computes the scores of
// its own tiles, all rows, and multiplies the weights of all tiles with its half of V's columns: S [64, 64] and half of O,
// [64, v_dim / 2], are in registers as softmax.cuh describes. latent.cuh says in which order.
#pragma once

#include "latent_ring.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kVDim>
class LatentWideRows {
  using Product = typename Kv::Product;
  using Sizes = LatentSizes<kDim, kVDim>;
  using Memory = LatentMemory<kDim, kVDim>;
  static constexpr int kOutputs = Sizes::kHalfPanels * 32, kTokenSteps = kTokens / 16;

 public:
  // `item`: its number in the look-up.
  __device__ LatentWideRows(const Params& p, Memory& memory, int item, int, int warpgroup)
      : p_(p), memory_(memory), item_(item), warpgroup_(warpgroup) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_[i] = 0;
  }

  // Starts the scores of a tile.
  __device__ __forceinline__ void start_scores(const LatentStages& stages) {
    const uint32_t a = panel_descriptor(shared_address(memory_.q));
    const uint32_t b = panel_descriptor(memory_.tile_address(stages));
    start_product_with_k<Sizes>(stages,
                                [&](uint32_t offset, bool adds) { wgmma_nt(s_, a + offset, b + offset, adds, Product()); });
  }

  // Turns the scores of this warpgroup's tile into weights; the rows' maxima up to the tile before are known.
  __device__ __forceinline__ void weigh(int left, const Item& item) {
    const auto mask = [&](int half) { return rows().masks[row() + half * 8]; };
    const auto behind = [&](int half) { return rows().behind[row() + half * 8]; };
    softmax_.template update<8>(s_, left, item.draft, mask, behind, p_, correction_);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) pack_weights<Product>(own_[step], &s_[8 * step]);
  }

  // Leaves weights and maxima for the other warpgroup, all of which are there after its next barrier.
  __device__ __forceinline__ void publish(const LatentStages& stages) {
    sync_threads(kWarpgroupBarrier + warpgroup_, kWarpgroupThreads);  // nobody reads the rope any more
    uint8_t* const weights = memory_.rope(stages);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
      store_matrices(own_[step], shared_address(weights) + weight_offset(step));
    if (lane_id() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) memory_.row_max[warpgroup_][row() + half * 8] = softmax_.row_max[half];
    }
  }

  // Takes what the other warpgroup has left.
  __device__ __forceinline__ void receive(const LatentStages& stages) {
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
      load_matrices(others_[step], shared_address(memory_.rope(stages)) + weight_offset(step));
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float higher = memory_.row_max[1 - warpgroup_][row() + half * 8];
      correction[half] = softmax_.row_max[half] == higher ? 1 : weight(softmax_.row_max[half], higher, p_);
      softmax_.row_max[half] = higher;
      softmax_.sum[half] *= correction[half];
    }
    rescale<kOutputs>(o_, correction);
  }

  __device__ __forceinline__ void start_others_values(const LatentStages& stages) {
    stages.wait_full(warpgroup_);
    fence_async_proxy();
    start_values(stages, others_);
  }
  // O has to be complete up to the tile before.
  __device__ __forceinline__ void start_own_values(const LatentStages& stages) {
    rescale<kOutputs>(o_, correction_);
    start_values(stages, own_);
  }

  // Adds up both warpgroups' sums, and writes this one's columns.
  __device__ __forceinline__ void finish() {
    softmax_.finish();
    const unsigned lane = lane_id();
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sums(warpgroup_)[row() + half * 8] = softmax_.sum[half];
    }
    // Nobody multiplies Q any more either.
    sync_threads(kWideBarrier, kLatentComputing);
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax_.sum[half] += sums(1 - warpgroup_)[row() + half * 8];
    write();
  }

 private:
  __device__ const LatentRows<kWarpgroupRows>& rows() const { return memory_.rows[item_ % 2]; }
  __device__ float* sums(int warpgroup) const { return memory_.sums[item_ % 2][warpgroup]; }
  // The first of this thread's two rows; the second is 8 further.
  __device__ static int first_row() { return thread_of<kWarpgroupThreads>() / kWarpSize * 16; }
  __device__ static int row() { return first_row() + lane_id() / 4; }

  __device__ static uint32_t weight_offset(int step) {
    return panel_offset(first_row() + lane_id() % 16, 2 * step + lane_id() / 16, 0);
  }

  __device__ __forceinline__ void start_values(const LatentStages& stages, const uint32_t (&weights)[kTokenSteps][4]) {
    const uint32_t b = panel_descriptor(memory_.tile_address(stages)) +
                       descriptor_offset(kPanelBytes) * uint32_t(warpgroup_ * Sizes::kHalfPanels);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int panel = 0; panel < Sizes::kHalfPanels; ++panel)
        wgmma_nn(reinterpret_cast<float (&)[32]>(o_[32 * panel]), weights[step],
                 b + descriptor_offset(panel * kPanelBytes + step * 16 * kPanelRow), Product());
    }
    wgmma_commit();
  }

  // Through shared memory, over Q, so that threads store 16 bytes of a row side by side.
  __device__ __forceinline__ void write() const {
    const Results<T, kVDim> results(p_);
    const unsigned lane = lane_id();
    uint8_t* const panels = memory_.q + warpgroup_ * Sizes::kHalfPanels * kPanelBytes;
    const RowTarget targets[2] = {RowTarget(rows().targets[row()]), RowTarget(rows().targets[row() + 8])};
    float norm[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax_.sum[half], row_max = softmax_.row_max[half];
      norm[half] = norm_of<Kv>(Variant::kSinks ? sum_with_sink(sum, row_max, targets[half], p_) : sum, p_);
      if (warpgroup_ == 0 && lane % 4 == 0 && targets[half].used())
        results.store_lse2(targets[half], lse2(row_max, sum, p_));
    }
#pragma unroll
    for (int step = 0; step < Sizes::kHalfPanels * 4; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = results.pack(targets[i % 2],
                                make_float2(o_[8 * step + 2 * i] * norm[i % 2], o_[8 * step + 2 * i + 1] * norm[i % 2]));
      store_matrices(pairs,
                     shared_address(panels) + panel_offset(first_row() + lane % 16, 2 * step + lane / 16, kPanelBytes));
    }
    __syncwarp();
    constexpr int kChunks = Sizes::kHalfPanels * 8;  // of 16 bytes, of each of this warp's 16 rows
#pragma unroll 4
    for (int i = lane; i < 16 * kChunks; i += kWarpSize) {
      const int at = first_row() + i / kChunks, chunk = i % kChunks;
      const RowTarget to(rows().targets[at]);
      if (!to.used()) continue;
      results.store_packed(to, warpgroup_ * Sizes::kHalfPanels * kPanelColumns + chunk * 8,
                           *reinterpret_cast<const uint4*>(panels + panel_offset(at, chunk, kPanelBytes)));
    }
  }

  const Params& p_;
  Memory& memory_;
  const int item_, warpgroup_;
  Softmax softmax_;
  float o_[kOutputs], s_[32], correction_[2];
  uint32_t own_[kTokenSteps][4], others_[kTokenSteps][4];
};

}  // namespace pat
