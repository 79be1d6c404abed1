// The forward kernel. It runs a plan's work items: the output of a query with one part goes to `out`, parts and their
// log-sum-exp go to the workspace for merge.cuh. CTAs are persistent, one an SM: each has some of the plan's bins, one KV
// head at a time (PAT section 6), and runs narrow items by single warps (kv/plain_narrow.cuh) and wide items by warpgroups with a
// producer (wide.cuh, ring.cuh, kv/plain_convert.cuh). One kernel has several query tiles (BatchLLM section 4.4 fuses likewise).
// module.cu launches it.
#pragma once

#include "kv/plain_convert.cuh"
#include "kv/plain_narrow.cuh"
#include "wide.cuh"

namespace pat {

// Sizes of a kernel whose query tiles are the set `kMs`. V may be narrower than K.
template <typename Kv, int kDim, int kVDim, int kMs>
struct ForwardSizes {
  static constexpr bool kHasWide = (kMs & kWideTiles) != 0;
  static constexpr int kComputing = warpgroups(kDim) * kWarpgroupThreads;
  // Bytes for items, statistics, barriers and alignment.
  static constexpr int kRest = int(sizeof(AssignedItems<threads(kDim)>)) + (4 << 10);
  static constexpr bool kConverts = Kv::kBytes == 1;
  static constexpr int kBuffers = query_buffers(kConverts);
  static constexpr int kQueries = kBuffers * int(sizeof(WideQueries<kDim>));
  static constexpr int kFree = kSharedLimit - kRest - kQueries;
  // Alternating warpgroups hold K and V of two tiles while a third is loaded: with four stages, 64 rows took 34 ns a token
  // instead of 20 (benchmarks/notes/fp8-kv.md, "One group of warps that converts").
  static constexpr int kFewestStages = warpgroups(kDim) > 1 ? 6 : 2;
  // More than eight stages, K and V of four tiles, gain nothing. 8-bit KV waits for its conversion beside the ring.
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

// Shared memory of the kernel. Wide and narrow items use the same bytes, one kind at a time. Swizzled panels need
// 1,024-byte alignment.
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

// Registers of a thread before the producers give theirs away, and after; 65,536 in all at most. tests/test_cuda_build.py
// checks that nothing spills.
template <int kDim>
constexpr int kFirstRegisters = 65536 / threads(kDim);
constexpr int kLoadRegisters = 56;
template <int kDim>
constexpr int kComputeRegisters = (65536 / kWarpgroupThreads - kLoadRegisters) / warpgroups(kDim) / 8 * 8;

#if PAT_WGMMA
#define PAT_PHASE __forceinline__  // wgmma does not survive calls
#else
#define PAT_PHASE __noinline__  // registers are allocated better for one phase at a time
#endif

// The producer of 8-bit KV.
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

// In place of the first item to look up: this pass runs the kind of items that the pass before left.
constexpr int kSameLookUp = -1;

// Each iteration of the loop is a pass: it looks up items, then runs one kind of them, wide or narrow. The next pass runs
// the other kind of the same look-up; only then, rarely, more are looked up. Wide items come first, because at the end
// nothing would hide how long they take to start. If the plan says so, every second CTA runs narrow items first, which use
// the memory bandwidth that wide items leave.
//
// GPUs fetch the first 64 KB of a kernel at launch, and the rest when it is reached, 0.3 us a KB
// (benchmarks/notes/code-placement.md, "Where code lies in memory"). The compiler lays a branch out from its last
// alternative to its first. So what small batches run comes first in memory: look-up, producers, items of 8 rows, wide
// items, items of 16 rows; with drafts wide items come before all narrow ones.
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
  // No barrier between the two: every warp has its own memory, and each phase its own team barriers.
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
    // A shuffle tells the compiler that the value is uniform in a warp (wide.cuh, `this_warpgroup`).
    const bool wide =
        S::kHasWide && __shfl_sync(~0u, items.count(kWide) > 0 && (from == kSameLookUp) == items.wide_last(), 0);
    // Whether the other kind of items is left after this pass.
    const auto phase_left = [&](bool ran_wide) {
      return items.wide_last() ? !ran_wide & (items.count(kWide) > 0) : ran_wide;
    };
    // Which kind ran. `fresh` hides the value from the compiler, so that it keeps the branches' code apart and in its place
    // in memory.
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
