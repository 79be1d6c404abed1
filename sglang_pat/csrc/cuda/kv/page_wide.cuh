// The forward kernel for KV pages of 4 or 2 bits with wide and narrow items: a pass over the wide ones as in forward.cuh,
// with the producer of page_convert.cuh, then a pass over the narrow ones as in page.cuh. Only with wgmma:
// elsewhere no table of tiles for pages has wide ones (`capabilities.query_tiles`). module.cu launches it.
#pragma once

#include "page.cuh"
#include "page_convert.cuh"

namespace pat {

template <typename Kv, int kDim>
struct WidePageSizes {
  static constexpr int kComputing = warpgroups(kDim) * kWarpgroupThreads, kThreads = threads(kDim);
  static constexpr int kStages = 6;  // see `ForwardSizes::kFewestStages`
  static constexpr int kBuffers = query_buffers(true);
  // Bytes beside the ring, Q and records in `WidePagesMemory`, which is padded twice to its alignment.
  static constexpr int kRest = int(sizeof(AssignedItems<kPageThreads>) + kBuffers * sizeof(WideStatistics) +
                                   sizeof(WideBarriers<kStages, kBuffers>)) +
                               2 * kPanelAlign;
  static constexpr int kFree =
      kSharedLimit - kRest - kBuffers * int(sizeof(WideQueries<kDim>)) - kStages * kStageBytes<kDim>;
  // As many records as fit, and no more than tiles of 8-bit KV (`ForwardSizes::kAhead`).
  static constexpr int kAhead = std::min(8, kFree / Record<Kv::kBits, kDim>::kBytes);
  static_assert(warpgroups(kDim) > 1 && kComputing >= kPageThreads && kAhead >= 2);
  // Registers of a thread: multiples of eight, at least 24 (PTX ISA, `setmaxnreg`). Narrow items are run by kPageThreads
  // threads, which get what the idle ones release of the SM's 65,536.
  static constexpr int kIdleRegisters = 24;
  static constexpr int kNarrowRegisters = (65536 - (kThreads - kPageThreads) * kIdleRegisters) / kPageThreads / 8 * 8;
};

template <typename Kv, int kDim>
struct WidePagesMemory {
  using S = WidePageSizes<Kv, kDim>;
  using Wide = WidePageMemory<Kv, kDim, S::kStages, S::kAhead>;
  struct Narrow {
    alignas(kPanelAlign) uint8_t stages[kPageWarps * PageSizes<Kv, kDim>::kStages * PageSizes<Kv, kDim>::kStage];
    NarrowStatistics<kPageWarps> statistics;
  };
  union {
    Wide wide;
    Narrow narrow;
  };
  WideStatistics statistics[S::kBuffers];
  WideBarriers<S::kStages, Wide::kBuffers> barriers;
  AssignedItems<kPageThreads> assigned;
};

template <typename T, typename Kv, int kDim, int kMs>
__global__ void __launch_bounds__(threads(kDim), 1) forward_wide_pages(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  using Memory = WidePagesMemory<Kv, kDim>;
  using S = typename Memory::S;
  using Wide = typename Memory::Wide;
  using WorkItems = Items<kPageThreads>;
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit);
  launch_dependents();
  memory.barriers.template init<kDim>(false);
  WorkItems items(p, memory.assigned);
  const auto look_up = [&](int first) { items.template look_up<kPageWarps, S::kThreads>(first, kMs); };
  const auto join_barriers = [&](int) { items.join_barriers(); };
  // Runs all items of the CTA from its first on, and returns whether that took more than one look-up, which is rare.
  const auto pass = [&](const auto& look_up, const auto& run) {
    int first = 0;
    while (true) {
      run();
      if (!items.more()) return first > 0;
      __syncthreads();
      memory.barriers.template init<kDim>(true);
      look_up(first += kPageThreads);
    }
  };
  // The pass over narrow items that follows the one over wide ones.
  const auto pass_again = [&](bool from_first, const auto& look_up, const auto& run) {
    if (from_first) {
      __syncthreads();
      look_up(0);
    }
    pass(look_up, run);
  };
  const auto nothing = [] {};
  look_up(0);
  wait_for_primary();
  if (threadIdx.x >= S::kComputing) {
    shrink_registers<kLoadRegisters>();
    const bool several = pass(join_barriers, [&] {
      PageProducer<T, Kv, kDim, S::kStages, S::kAhead, WorkItems>(p, items, memory.wide, memory.barriers).run();
    });
    wait_copies<0>();
    // The warps of a warpgroup have to meet between two setmaxnreg (PTX ISA).
    sync_threads(kProducerBarrier, producer_threads(kDim));
    shrink_registers<S::kIdleRegisters>();
    pass_again(several, join_barriers, nothing);
  } else {
    grow_registers<kComputeRegisters<kDim>>();
    const bool several = pass(look_up, [&] {
      if (items.count(kWide) > 0)
        WideWarpgroup<T, Kv, kDim, kDim, S::kStages, Wide, WorkItems>(p, items, memory.wide, memory.statistics,
                                                                      memory.barriers)
            .run();
    });
    // Narrow items reuse the shared memory, and registers change again.
    sync_threads(kRegistersBarrier, S::kComputing);
    if (threadIdx.x >= kPageThreads) {
      shrink_registers<S::kIdleRegisters>();
      pass_again(several, join_barriers, nothing);
    } else {
      grow_registers<S::kNarrowRegisters>();
      pass_again(several, look_up, [&] {
        if constexpr ((kMs & tile_bit(kSingleM)) != 0) {
          if (items.count(kSingle) > 0)
            PageWarp<T, Kv, kDim, kSingleM>(p, items, memory.narrow.stages, memory.narrow.statistics).run();
        }
        if constexpr ((kMs & tile_bit(kNarrowM)) != 0) {
          if (items.count(kNarrow) > 0)
            PageWarp<T, Kv, kDim, kNarrowM>(p, items, memory.narrow.stages, memory.narrow.statistics).run();
        }
      });
    }
  }
}

}  // namespace pat
