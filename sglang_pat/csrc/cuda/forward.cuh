// Forward: persistent workers, one an SM, each with the bins that the plan gives it, one KV head at a time (PAT §6). One
// kernel has one or several Q tiles and switches between them from work item to work item (BatchLLM §4.4 fuses likewise).
#pragma once

#include "convert.cuh"
#include "narrow.cuh"
#include "wide.cuh"

namespace pat {

// Of a kernel whose Q tiles are `kMs`. V may be narrower than K.
template <typename Kv, int kDim, int kVDim, int kMs>
struct ForwardSizes {
  static constexpr bool kHasWide = (kMs & kWideTiles) != 0;
  static constexpr int kComputing = groups(kDim) * kGroupThreads;
  // Items, statistics, barriers, alignment.
  static constexpr int kRest = int(sizeof(AssignedItems<threads(kDim)>)) + (4 << 10);
  static constexpr bool kConverts = Kv::kBytes == 1;
  static constexpr int kBuffers = query_buffers(kConverts);
  static constexpr int kQueries = kBuffers * int(sizeof(WideQueries<kDim>));
  static constexpr int kFree = kSharedLimit - kRest - kQueries;
  // Groups that take turns hold K and V of two tiles while those of a third come: with four stages, 64 rows took 34 ns a
  // token in place of 20 (benchmarks/NOTES.md, 2026-11-23).
  static constexpr int kFewestStages = groups(kDim) > 1 ? 6 : 2;
  // More than eight stages bring nothing: K and V of four tiles. KV of 8 bits waits for its conversion beside them.
  static constexpr int kStages = kConverts ? kFewestStages : std::min(8, kFree / kStageBytes<kDim> / 2 * 2);
  static constexpr int kAhead = kConverts ? std::min(8, (kFree - kStages * kStageBytes<kDim>) / kAheadBytes<kDim>) : 0;
  static constexpr int kNarrowWarps = std::min(
      groups(kDim) * kGroupWarps, (kSharedLimit - kRest) / NarrowSizes<Kv, kDim, kVDim>::kWarp / kGroupWarps * kGroupWarps);
  static_assert(kVDim <= kDim && kVDim % 32 == 0);
  static_assert(kStages >= kFewestStages && kNarrowWarps > 0 && (!kConverts || kAhead > 0));
};

// Panels are 1,024-byte aligned, as swizzled tiles must be.
template <typename Kv, int kDim, int kVDim, int kMs>
struct ForwardMemory {
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  struct Narrow {
    alignas(1024) uint8_t chunks[S::kNarrowWarps * NarrowSizes<Kv, kDim, kVDim>::kWarp];
    NarrowStatistics<S::kNarrowWarps> statistics;
  };
  union {
    WideMemory<kDim, S::kStages, S::kAhead> wide;
    Narrow narrow;
  };
  WideStatistics statistics;
  WideBarriers<S::kStages, S::kBuffers> barriers;
  AssignedItems<threads(kDim)> assigned;
};

// Registers of a thread after the warps that load gave theirs away; all together 65,536 at most. Which ones spill nowhere is
// for the compiler to tell (tests/test_cuda_build.py).
constexpr int kLoadRegisters = 56;
template <int kDim>
constexpr int kComputeRegisters = (65536 / kGroupThreads - kLoadRegisters) / groups(kDim) / 8 * 8;

#if PAT_WGMMA
#define PAT_PHASE __forceinline__  // wgmma does not go with calls
#else
#define PAT_PHASE __noinline__  // and without it registers are allotted better to one phase at a time
#endif

template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__device__ PAT_PHASE void run_wide(
    const Params& p, const Items<threads(kDim)>& items, ForwardMemory<Kv, kDim, kVDim, kMs>& memory,
    WideCursors<ForwardSizes<Kv, kDim, kVDim, kMs>::kStages, ForwardSizes<Kv, kDim, kVDim, kMs>::kBuffers>& cursors) {
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  using Memory = WideMemory<kDim, S::kStages, S::kAhead>;
  WideGroup<T, Kv, kDim, kVDim, S::kStages, Memory, Items<threads(kDim)>>(p, items, memory.wide, memory.statistics, cursors)
      .run();
}

template <typename T, typename Kv, int kDim, int kVDim, int kMs, int kM>
__device__ PAT_PHASE void run_narrow(const Params& p, const Items<threads(kDim)>& items,
                                     ForwardMemory<Kv, kDim, kVDim, kMs>& memory) {
  constexpr int kWarps = ForwardSizes<Kv, kDim, kVDim, kMs>::kNarrowWarps;
  if (threadIdx.x / kWarpSize < kWarps)
    NarrowWarp<T, Kv, kDim, kVDim, kM, kWarps>(p, items, memory.narrow.chunks, memory.narrow.statistics).run();
}

template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__global__ void __launch_bounds__(threads(kDim), 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ForwardMemory<Kv, kDim, kVDim, kMs>*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit);
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  constexpr int kThreads = threads(kDim);
  constexpr bool kTradeRegisters = groups(kDim) > 1;
  launch_dependents();
  if (S::kHasWide && threadIdx.x < S::kStages) {
    init_barrier(shared_address(&memory.barriers.ring.full[threadIdx.x]), producer_threads(kDim));
    init_barrier(shared_address(&memory.barriers.ring.empty[threadIdx.x]), groups(kDim) * kGroupWarps);
    if (threadIdx.x < S::kBuffers) {
      init_barrier(shared_address(&memory.barriers.queries.full[threadIdx.x]), 2 * producer_threads(kDim));
      init_barrier(shared_address(&memory.barriers.queries.empty[threadIdx.x]), S::kComputing);
    }
  }
  Items<kThreads> items(p, memory.assigned);
  const auto look_up = [&](int first) { items.template look_up<S::kNarrowWarps>(first, kMs); };
  // Whether there may be items beyond those from `first` on; then they are looked up. That is rare.
  const auto more = [&](int& first) {
    if (!items.more()) return false;
    __syncthreads();
    look_up(first += kThreads);
    return true;
  };
  look_up(0);
  wait_for_primary();
  int first = 0;
  if (threadIdx.x >= S::kComputing) {
    if constexpr (kTradeRegisters) shrink_registers<kLoadRegisters>();
    using Loader = std::conditional_t<S::kConverts, ConvertingProducer<T, Kv, kDim, kVDim, S::kStages, S::kAhead>,
                                      Producer<T, kDim, kVDim, S::kStages>>;
    Loader producer(p, items, memory.wide, memory.barriers);
    do {
      if constexpr (S::kHasWide) producer.run();
    } while (more(first));
    wait_copies<0>();
  } else {
    if constexpr (kTradeRegisters) grow_registers<kComputeRegisters<kDim>>();
    WideCursors<S::kStages, S::kBuffers> cursors(memory.barriers);
    do {
      // Wide items first: nothing would hide how long they take to begin at the end. A phase without items is passed over.
      if constexpr (S::kHasWide) {
        if (items.count(kWide) > 0) {
          run_wide<T, Kv, kDim, kVDim, kMs>(p, items, memory, cursors);
          // The others use the same shared memory.
          sync_threads(kTurnBarrier, S::kComputing);
        }
      }
      if constexpr ((kMs & tile_bit(kSingleM)) != 0) {
        if (items.count(kSingle) > 0) run_narrow<T, Kv, kDim, kVDim, kMs, kSingleM>(p, items, memory);
      }
      // Without waiting: every warp has its memory, every phase its teams' barriers.
      if constexpr ((kMs & tile_bit(kNarrowM)) != 0) {
        if (items.count(kNarrow) > 0) run_narrow<T, Kv, kDim, kVDim, kMs, kNarrowM>(p, items, memory);
      }
    } while (more(first));
  }
}

}  // namespace pat
