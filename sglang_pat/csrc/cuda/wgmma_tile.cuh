// A tile of 64 or 128 rows by wgmma: each warp has 16 rows of every 64. With two blocks of 64 rows, the tensor cores
// work on one while the softmax of the other is computed.
#pragma once

#include "results.cuh"
#include "softmax.cuh"
#include "wgmma_ptx.cuh"

#if PAT_WGMMA
namespace pat {

template <typename T, int kDim, int kTokens, int kM>
class WgmmaTile {
  static_assert(kTokens == 64 && kM % 64 == 0 && kM <= 128);
  static constexpr int kRowBlocks = kM / 64;
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanel = kTokens * kPanelRow, kQPanel = kM * kPanelRow;

 public:
  struct Shared {};

  __device__ WgmmaTile(int, uint32_t q, float*, Shared&, const Params& p) : q_(q), p_(p) {}

  __device__ void begin() {}

  // Only starts the products.
  __device__ void scores(uint32_t k, int) {
    const uint64_t a = panel_descriptor(q_), b = panel_descriptor(k);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int panel = step / 4, column = step % 4 * 32;
        wgmma_nt(s_[block], a + descriptor_offset(panel * kQPanel + block * 64 * kPanelRow + column),
                 b + descriptor_offset(panel * kPanel + column), step > 0, T());
      }
      wgmma_commit();
    }
  }

  // The first block's.
  __device__ void weights(int tokens) {
    wgmma_wait<kRowBlocks - 1>();
    soften(0, tokens);
  }

  // Starts the first block's product.
  __device__ void values(uint32_t v, int) {
    v_ = v;
    multiply(0);
  }

  __device__ void values_end(int tokens) {
    if constexpr (kRowBlocks == 2) {
      wgmma_wait<1>();
      soften(1, tokens);
      multiply(1);
    }
    wgmma_wait<0>();
  }

  __device__ void finish(const Results<T, kDim>& results) {
    const int thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      softmax_[block].finish();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto to = results.row(block * 64 + warp * 16 + lane / 4 + half * 8);
        const float sum = softmax_[block].sum[half], norm = sum > 0 ? 1 / sum : 0;
        if (lane % 4 == 0) results.store_lse(to, lse(softmax_[block].top[half], sum, p_));
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          const float* o = &o_[block][i / 8][i % 8 * 4 + 2 * half];
          results.store(to, i * 8 + lane % 4 * 2, o[0] * norm, o[1] * norm);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void soften(int block, int tokens) {
    float factor[2];
    softmax_[block].template update<kTokens / 8>(s_[block], 0, tokens, p_, factor);
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kPanels * 32; ++i) o_[block][i / 32][i % 32] *= factor[i / 2 % 2];
    }
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) pack_weights<T>(weights_[block][step], &s_[block][8 * step]);
  }

  __device__ __forceinline__ void multiply(int block) {
    const uint64_t b = panel_descriptor(v_);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        wgmma_nn(o_[block][panel], weights_[block][step],
                 b + descriptor_offset(panel * kPanel + step * 16 * kPanelRow), T());
    }
    wgmma_commit();
  }

  const uint32_t q_;
  const Params& p_;
  uint32_t v_ = 0;
  Softmax softmax_[kRowBlocks];
  float s_[kRowBlocks][kTokens / 2];
  uint32_t weights_[kRowBlocks][kTokens / 16][4];
  float o_[kRowBlocks][kPanels][32] = {};
};

}  // namespace pat
#endif
