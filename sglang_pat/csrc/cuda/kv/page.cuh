// The forward kernel for KV pages of 4 or 2 bits, narrow items only: as forward.cuh, by single warps (page_rows.cuh).
// Modules with wide items use page_wide.cuh. module.cu launches it.
#pragma once

#include "../forward.cuh"
#include "page_rows.cuh"

namespace pat {

template <typename Kv, int kDim>
struct PageMemory {
  using S = PageSizes<Kv, kDim>;
  alignas(kPanelAlign) uint8_t stages[kPageWarps * S::kStages * S::kStage];
  NarrowStatistics<kPageWarps> statistics;
  AssignedItems<kPageThreads> assigned;
};

template <typename T, typename Kv, int kDim, int kM>
__device__ PAT_PHASE void run_pages(const Params& p, const Items<kPageThreads>& items, PageMemory<Kv, kDim>& memory) {
  PageWarp<T, Kv, kDim, kM>(p, items, memory.stages, memory.statistics).run();
}

template <typename T, typename Kv, int kDim, int kMs>
__global__ void __launch_bounds__(kPageThreads, 1) forward_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<PageMemory<Kv, kDim>*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit && (kMs & kWideTiles) == 0);
  launch_dependents();
  Items<kPageThreads> items(p, memory.assigned);
  int first = 0;
  items.template look_up<kPageWarps>(first, kMs);
  wait_for_primary();
  while (true) {
    if constexpr ((kMs & tile_bit(kSingleM)) != 0) {
      if (items.count(kSingle) > 0) run_pages<T, Kv, kDim, kSingleM>(p, items, memory);
    }
    // No barrier between the two: every warp has its own memory, and each phase its own team barriers.
    if constexpr ((kMs & tile_bit(kNarrowM)) != 0) {
      if (items.count(kNarrow) > 0) run_pages<T, Kv, kDim, kNarrowM>(p, items, memory);
    }
    if (!items.more()) break;
    __syncthreads();
    items.template look_up<kPageWarps>(first += kPageThreads, kMs);
  }
}

}  // namespace pat
