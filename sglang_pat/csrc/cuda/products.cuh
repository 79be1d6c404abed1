// The two matrix products of a warpgroup, 64 rows by 64 tokens: S = Q K^T with both from shared memory, O += P V with P in
// registers. By wgmma on Hopper, else by mma.sync. Each warp has 16 of the rows, and accumulators lie as in softmax.cuh.
// wide.cuh calls them.
#pragma once

#include "smem.cuh"
#include "softmax.cuh"
#include "wgmma_ptx.cuh"

namespace pat {

template <typename T, int kDim, int kVDim>
class Products {
  static constexpr int kSteps = kDim / 16, kVSteps = kVDim / 16, kTokenSteps = kTokens / 16;

 public:
  // Accumulators of O a thread: panels of 64 columns, 32 each.
  static constexpr int kOutputs = panels(kVDim) * 32;

  // s = q k^T. `q`: shared address of the 64 rows, whose panels are `q_panel` bytes apart. `k`: of a stage. Asynchronous
  // with wgmma.
  static __device__ __forceinline__ void scores(float (&s)[32], uint32_t q, int q_panel, uint32_t k) {
#if PAT_WGMMA
    const uint32_t a = panel_descriptor(q), b = panel_descriptor(k);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int panel = step / 4, column = step % 4 * 32;
      wgmma_nt(s, a + panel * (q_panel >> 4) + descriptor_offset(column),
               b + descriptor_offset(panel * kPanelBytes + column), step > 0, T());
    }
    wgmma_commit();
#else
    const unsigned lane = lane_id(), warp = thread_of<kWarpgroupThreads>() / kWarpSize;
    const int row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_matrices(a, q + panel_offset(warp * 16 + lane % 16, 2 * step + lane / 16, q_panel));
#pragma unroll
      for (int pair = 0; pair < kTokenSteps; ++pair) {
        uint32_t b[4];
        load_matrices(b, k + panel_offset(pair * 16 + row, 2 * step + chunk, kPanelBytes));
        Half<T>::mma(reinterpret_cast<float (&)[4]>(s[8 * pair]), a, b[0], b[1]);
        Half<T>::mma(reinterpret_cast<float (&)[4]>(s[8 * pair + 4]), a, b[2], b[3]);
      }
    }
#endif
  }

  // o += weights v. `v`: shared address of a stage. Asynchronous with wgmma.
  static __device__ __forceinline__ void values(float (&o)[kOutputs], const uint32_t (&weights)[kTokenSteps][4],
                                                uint32_t v) {
#if PAT_WGMMA
    const uint32_t b = panel_descriptor(v);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int panel = 0; panel < panels(kVDim); ++panel)
        wgmma_nn(reinterpret_cast<float (&)[32]>(o[32 * panel]), weights[step],
                 b + descriptor_offset(panel * kPanelBytes + step * 16 * kPanelRow), T());
    }
    wgmma_commit();
#else
    const unsigned lane = lane_id();
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kVSteps; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(b, v + panel_offset(step * 16 + lane % 16, 2 * pair + lane / 16, kPanelBytes));
        Half<T>::mma(reinterpret_cast<float (&)[4]>(o[8 * pair]), weights[step], b[0], b[1]);
        Half<T>::mma(reinterpret_cast<float (&)[4]>(o[8 * pair + 4]), weights[step], b[2], b[3]);
      }
    }
#endif
  }

  // Waits for all but the last `kPending` products.
  template <int kPending>
  static __device__ __forceinline__ void wait() {
#if PAT_WGMMA
    wgmma_wait<kPending>();
#endif
  }
};

}  // namespace pat
