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
  static constexpr int kComputing = warpgroups(kDim) * kWarpgroupThreads;
  // Items, statistics, barriers, alignment.
  static constexpr int kRest = int(sizeof(AssignedItems<threads(kDim)>)) + (4 << 10);
  static constexpr bool kConverts = Kv::kBytes == 1;
  static constexpr int kBuffers = query_buffers(kConverts);
  static constexpr int kQueries = kBuffers * int(sizeof(WideQueries<kDim>));
  static constexpr int kFree = kSharedLimit - kRest - kQueries;
  // Groups that take turns hold K and V of two tiles while those of a third come: with four stages, 64 rows took 34 ns a
  // token in place of 20 (benchmarks/NOTES.md, 2026-11-23).
  static constexpr int kFewestStages = warpgroups(kDim) > 1 ? 6 : 2;
  // More than eight stages run_producer nothing: K and V of four tiles. KV of 8 bits waits for its conversion beside them.
  static constexpr int kStages = kConverts ? kFewestStages : std::min(8, kFree / kStageBytes<kDim> / 2 * 2);
  static constexpr int kAhead =
      kConverts ? std::min(8, (kFree - kStages * kStageBytes<kDim>) / kAheadBytes<kDim> / converting_warpgroups(kDim)) : 0;
  static constexpr int kNarrowWarps =
      std::min(warpgroups(kDim) * kWarpgroupWarps,
               (kSharedLimit - kRest) / NarrowSizes<Kv, kDim, kVDim>::kWarp / kWarpgroupWarps * kWarpgroupWarps);
  static_assert(kVDim <= kDim && kVDim % 32 == 0);
  static_assert((kMs & ~(2 * tile_bit(wide_warpgroups(kDim) * kWarpgroupRows) - 1)) == 0);
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
  WideStatistics statistics[S::kBuffers];
  WideBarriers<S::kStages, S::kBuffers> barriers;
  AssignedItems<threads(kDim)> assigned;
};

// Registers of a thread before the warps that load give theirs away, and after; all together 65,536 at most. Which ones spill nowhere is
// for the compiler to tell (tests/test_cuda_build.py).
template <int kDim>
constexpr int kFirstRegisters = 65536 / threads(kDim);
constexpr int kLoadRegisters = 56;
template <int kDim>
constexpr int kComputeRegisters = (65536 / kWarpgroupThreads - kLoadRegisters) / warpgroups(kDim) / 8 * 8;

#if PAT_WGMMA
#define PAT_PHASE __forceinline__  // wgmma does not go with calls
#else
#define PAT_PHASE __noinline__  // and without it registers are allotted better to one phase at a time
#endif

// KV of wide items, and Q, converted.
template <typename T, typename Kv, int kDim, int kVDim, int kMs, ProducerRole kRole>
__device__ __forceinline__ void run_producer(const Params& p, const Items<threads(kDim)>& items,
                                             ForwardMemory<Kv, kDim, kVDim, kMs>& memory) {
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  ConvertingProducer<T, Kv, kDim, kVDim, S::kStages, S::kAhead, kRole>(p, items, memory.wide, memory.barriers).run();
  wait_copies<0>();
}

template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__device__ PAT_PHASE void run_wide(const Params& p, const Items<threads(kDim)>& items,
                                   ForwardMemory<Kv, kDim, kVDim, kMs>& memory) {
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  using Memory = WideMemory<kDim, S::kStages, S::kAhead>;
  if (!two_convert(kDim) || thread_of_cta() < wide_warpgroups(kDim) * kWarpgroupThreads) {
    WideWarpgroup<T, Kv, kDim, kVDim, S::kStages, Memory, Items<threads(kDim)>>(p, items, memory.wide, memory.statistics,
                                                                                memory.barriers)
        .run();
  } else {
    if constexpr (two_convert(kDim)) run_producer<T, Kv, kDim, kVDim, kMs, ProducerRole::kV>(p, items, memory);
  }
}

template <typename T, typename Kv, int kDim, int kVDim, int kMs, int kM>
__device__ PAT_PHASE void run_narrow(const Params& p, const Items<threads(kDim)>& items,
                                     ForwardMemory<Kv, kDim, kVDim, kMs>& memory) {
  constexpr int kWarps = ForwardSizes<Kv, kDim, kVDim, kMs>::kNarrowWarps;
  if (threadIdx.x / kWarpSize < kWarps)
    NarrowWarp<T, Kv, kDim, kVDim, kM, kWarps>(p, items, memory.narrow.chunks, memory.narrow.statistics).run();
}

// In place of the item from which on a pass looks items up: it looks up none, and runs those of the last look-up that have not been run.
constexpr int kSameLookUp = -1;

// Runs wide items first, for nothing would hide how long they take to begin at the end; then the others of the same look-up; and rarely
// looks up more. Each is a pass of one loop, so that its code is there once. Where a plan says so, every second worker runs the others first: what
// wide items leave of the memory's bandwidth is then used.
//
// GPUs fetch the first 64 KB of a kernel when it starts, and what lies behind them when it is run: 0.3 us for each KB (benchmarks/NOTES.md,
// "Where code lies in memory"). The compiler lays a branch out from its last alternative to its first. So what small batches run comes
// first in memory: the look-up, the warps that load, items of 8 rows, wide items, items of 16 rows; with drafts wide items before all others.
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__global__ void __launch_bounds__(threads(kDim), 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ForwardMemory<Kv, kDim, kVDim, kMs>*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit);
  using S = ForwardSizes<Kv, kDim, kVDim, kMs>;
  constexpr int kThreads = threads(kDim);
  constexpr bool kTradeRegisters = warpgroups(kDim) > 1;
  launch_dependents();
  Items<kThreads> items(p, memory.assigned);
  // These do not wait for one another: every warp has its memory, every phase its teams' barriers.
  const auto single = [&] {
    if constexpr ((kMs & tile_bit(kSingleM)) != 0) {
      if (items.count(kSingle) > 0) run_narrow<T, Kv, kDim, kVDim, kMs, kSingleM>(p, items, memory);
    }
  };
  const auto narrow = [&] {
    if constexpr ((kMs & tile_bit(kNarrowM)) != 0) {
      if (items.count(kNarrow) > 0) run_narrow<T, Kv, kDim, kVDim, kMs, kNarrowM>(p, items, memory);
    }
  };
#pragma unroll 1
  for (int from = 0;;) {
    if (from != kSameLookUp) {
      if constexpr (S::kHasWide) memory.barriers.template init<kDim>(from > 0);
      items.template look_up<S::kNarrowWarps>(from, kMs);
      wait_for_primary();
    }
    // By a shuffle, so that the compiler knows that it is the same for a warp (wide.cuh, `this_warpgroup`).
    const bool wide =
        S::kHasWide && __shfl_sync(~0u, items.count(kWide) > 0 && (from == kSameLookUp) == items.wide_last(), 0);
    // Whether a pass that ran wide items, or all others, has left the other kind.
    const auto phase_left = [&](bool ran_wide) {
      return items.wide_last() ? !ran_wide & (items.count(kWide) > 0) : ran_wide;
    };
    // Which kind it was: what the compiler cannot know keeps the other branch's code out of this one, and so in its place in memory.
    uint32_t ran_wide;
    if (thread_of_cta() < S::kComputing) {
      if constexpr (kTradeRegisters) {
        grow_registers<kComputeRegisters<kDim>>();
        arrive_threads(wide ? kGrownInWide : kGrownInNarrow, kThreads);
      }
      if (wide) {
        if constexpr (S::kHasWide) run_wide<T, Kv, kDim, kVDim, kMs>(p, items, memory);
        ran_wide = fresh(1u);
      } else {
        if constexpr (!Variant::kMasks) single();
        ran_wide = fresh(0u);
      }
      if (ran_wide == 0) {
        if constexpr (Variant::kMasks) single();
        narrow();
        ran_wide = fresh(0u);  // not kept in a register meanwhile
      }
      const bool left = phase_left(ran_wide != 0);
      if (!left & !items.more()) break;
      from = left ? kSameLookUp : items.next();
      if constexpr (kTradeRegisters) {
        sync_threads(kRegistersBarrier, S::kComputing);  // as PTX demands between two changes
        shrink_registers<kFirstRegisters<kDim>>();
      }
    } else {
      if constexpr (kTradeRegisters) shrink_registers<kLoadRegisters>();
      if (wide) {
        if constexpr (S::kHasWide) {
          if constexpr (S::kConverts) {
            run_producer<T, Kv, kDim, kVDim, kMs, two_convert(kDim) ? ProducerRole::kK : ProducerRole::kKAndV>(p, items,
                                                                                                               memory);
          } else {
            Producer<T, kDim, kVDim, S::kStages>(p, items, memory.wide, memory.barriers).run();
            wait_copies<0>();
          }
        }
        if constexpr (kTradeRegisters) sync_threads(kGrownInWide, kThreads);
        ran_wide = fresh(1u);
      } else {
        if constexpr (kTradeRegisters) sync_threads(kGrownInNarrow, kThreads);
        ran_wide = fresh(0u);
      }
      const bool left = phase_left(ran_wide != 0);
      if (!left & !items.more()) break;
      from = left ? kSameLookUp : items.next();
      if constexpr (kTradeRegisters) grow_registers<kFirstRegisters<kDim>>();
    }
    __syncthreads();
  }
}

}  // namespace pat
