// Forward: persistent workers, one an SM, each with the bins that the plan gives it, one KV head at a time (PAT §6). One
// kernel has one or several Q tiles and switches between them from work item to work item (BatchLLM §4.4 fuses likewise).
#pragma once

#include "narrow.cuh"
#include "wide.cuh"

namespace pat {

// Of a kernel whose Q tiles are the bits of `kMs`.
template <int kDim, int kMs>
struct ForwardSizes {
  static constexpr bool kHasWide = (kMs & ~kNarrowM) != 0;
  static constexpr int kMaxM = kMs & 128 ? 128 : 64;
  static constexpr int kRest =
      (4 << 10) + threads(kDim) / kWarpSize * int(sizeof(ItemWindow));  // windows, statistics, barriers, alignment
  static constexpr int kQ = kMaxM * panels(kDim) * kPanelRow;
  static constexpr int kScratch = groups(kDim) == 2 ? 64 * kDim * 4 : 0;
  // More than eight units bring nothing: K and V of four tiles.
  static constexpr int kUnits = std::min(8, (kSharedLimit - kRest - kQ - kScratch) / kUnitBytes<kDim> / 2 * 2);
  static constexpr int kNarrowWarps = std::min(
      groups(kDim) * kGroupWarps, (kSharedLimit - kRest) / NarrowSizes<kDim>::kWarp / kGroupWarps * kGroupWarps);
  // The groups need K and V of two tiles to take turns.
  static_assert(kUnits >= 4 && kNarrowWarps > 0);
  static_assert(groups(kDim) == 2 || (kMs & 128) == 0);
};

// Panels are 1,024-byte aligned, as swizzled tiles must be.
template <int kDim, int kMs>
struct ForwardMemory {
  using S = ForwardSizes<kDim, kMs>;
  struct Wide {
    alignas(1024) uint8_t ring[S::kUnits * kUnitBytes<kDim>];
    alignas(1024) uint8_t q[S::kQ];
    float scratch[S::kScratch / 4 + 1];  // there is no array of nothing
    WideStatistics statistics;
  };
  struct Narrow {
    alignas(1024) uint8_t chunks[S::kNarrowWarps * NarrowSizes<kDim>::kWarp];
    NarrowStatistics<S::kNarrowWarps> statistics;
  };
  union {
    Wide wide;
    Narrow narrow;
  };
  RingBarriers<S::kUnits> barriers;
  ItemWindow windows[threads(kDim) / kWarpSize];
};

// Registers of a thread after the warps that load gave theirs away; all together 65,536 at most. Which ones spill nowhere is
// for the compiler to tell (tests/test_cuda_build.py).
template <int kDim>
constexpr int kLoadRegisters = kDim <= 64 ? 88 : 72;
template <int kDim>
constexpr int kComputeRegisters = (65536 / kGroupThreads - kLoadRegisters<kDim>) / groups(kDim) / 8 * 8;

#if PAT_WGMMA
#define PAT_PHASE __forceinline__  // wgmma does not go with calls
#else
#define PAT_PHASE __noinline__  // and without it registers are allotted better to one phase at a time
#endif

template <typename T, int kDim, int kMs>
__device__ PAT_PHASE void run_wide(const Params& p, Items& items, ForwardMemory<kDim, kMs>& memory) {
  WideGroup<T, kDim, ForwardSizes<kDim, kMs>::kUnits>(p, items, {memory.wide.ring, memory.barriers}, memory.wide.q,
                                                      memory.wide.scratch, memory.wide.statistics)
      .run(kMs & ~kNarrowM);
}

template <typename T, int kDim, int kMs>
__device__ PAT_PHASE void run_narrow(const Params& p, Items& items, ForwardMemory<kDim, kMs>& memory) {
  constexpr int kWarps = ForwardSizes<kDim, kMs>::kNarrowWarps;
  if (threadIdx.x / kWarpSize < kWarps)
    NarrowWarp<T, kDim, kWarps>(p, items, memory.narrow.chunks, memory.narrow.statistics).run();
}

template <typename T, int kDim, int kMs>
__global__ void __launch_bounds__(threads(kDim), 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ForwardMemory<kDim, kMs>*>(bytes);
  using S = ForwardSizes<kDim, kMs>;
  constexpr int kComputing = groups(kDim) * kGroupThreads;
  constexpr bool kTradeRegisters = groups(kDim) == 2;
  launch_dependents();
  if (S::kHasWide && threadIdx.x < S::kUnits) {
    init_barrier(shared_address(&memory.barriers.full[threadIdx.x]), loaders(kDim));
    init_barrier(shared_address(&memory.barriers.free[threadIdx.x]), groups(kDim) * kGroupWarps);
  }
  Items items(p, memory.windows);
  __syncthreads();
  // Wide items compute, narrow ones read: half of the SMs begin with the one, half with the other.
  const bool narrow_first = blockIdx.x % 2;
  if (threadIdx.x >= kComputing) {
    if constexpr (kTradeRegisters) shrink_registers<kLoadRegisters<kDim>>();
    if constexpr (S::kHasWide) {
      if (narrow_first) sync_threads(kPhaseBarrier, threads(kDim));
      Loader<kDim, S::kUnits>(p, items, {memory.wide.ring, memory.barriers}).run(kMs & ~kNarrowM);
    }
  } else {
    if constexpr (kTradeRegisters) grow_registers<kComputeRegisters<kDim>>();
    // The two use the same shared memory.
    bool narrow = narrow_first;
    while (true) {
      if (narrow) {
        if constexpr ((kMs & kNarrowM) != 0) run_narrow<T, kDim, kMs>(p, items, memory);
        if (!S::kHasWide || !narrow_first) break;
        sync_threads(kPhaseBarrier, threads(kDim));
        narrow = false;
      } else {
        if constexpr (S::kHasWide) run_wide<T, kDim, kMs>(p, items, memory);
        if (narrow_first) break;
        sync_threads(kPhaseBarrier, kComputing);
        narrow = true;
      }
    }
  }
}

}  // namespace pat
