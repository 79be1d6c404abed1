// KV pages of 4 or 2 bits (page_record.cuh): narrow items by eight single warps (page_rows.cuh). Where tables have wide
// tiles, which is on Hopper (`capabilities.query_tiles`), those are computed as with plain KV (wide.cuh), with the producer
// of page_convert.cuh.
#pragma once

#include <algorithm>

#include "../forward.cuh"
#include "../wide.cuh"
#include "page_convert.cuh"
#include "page_rows.cuh"

namespace pat {

// A format of forward.cuh, for query tiles of the set `kMs`.
template <typename T, typename Kv, int kDim, int kMs>
struct PageKv {
  static constexpr int kWideMs = kMs & kWideTiles, kNarrowMs = kMs & ~kWideTiles;
  static constexpr bool kLoads = kWideMs != 0;
  static constexpr int kThreads = kLoads ? threads(kDim) : kPageThreads, kItems = kPageThreads;
  static constexpr int kNarrowWarps = kPageWarps, kRecordBytes = Record<Kv::kBits, kDim>::kBytes;
  static __device__ int computing(bool wide) { return wide ? warpgroups(kDim) * kWarpgroupThreads : kPageThreads; }
  // Narrow items are run by kPageThreads threads, which get what the idle ones release of the SM's 65,536 registers.
  static constexpr int kIdle = 24, kMost = (65536 - (kThreads - kPageThreads) * kIdle) / kPageThreads / 8 * 8;
  static constexpr PassRegisters kRegisters =
      kLoads ? PassRegisters{kComputeRegisters<kDim>, kMost, kLoadRegisters, kIdle} : PassRegisters{};

  static constexpr int kStages = kFewestStages<kDim>, kBuffers = query_buffers(true);
  // Bytes beside the ring, Q and records; the whole is padded twice to its alignment.
  static constexpr int kRest =
      int(sizeof(AssignedItems<kItems>) + kBuffers * sizeof(WideStatistics) + sizeof(WideBarriers<kStages, kBuffers>)) +
      2 * kPanelAlign;
  static constexpr int kFree =
      kSharedLimit - kRest - kBuffers * int(sizeof(WideQueries<kDim>)) - kStages * kStageBytes<kDim>;
  // As many records as fit, and no more than tiles of 8-bit KV (`PlainKv::kAhead`).
  static constexpr int kAhead = std::min(8, kFree / kRecordBytes);
  static_assert(!kLoads || (warpgroups(kDim) > 1 && warpgroups(kDim) * kWarpgroupThreads >= kPageThreads));

  using WorkItems = Items<kItems>;
  using Wide = WidePageMemory<Kv, kDim, kStages, kAhead>;
  using Loader = PageProducer<T, Kv, kDim, kStages, kAhead, WorkItems>;

  struct Narrow {
    uint8_t stages[kPageWarps * PageSizes<Kv, kDim>::kStages * PageSizes<Kv, kDim>::kStage];
    NarrowStatistics<kPageWarps> statistics;
  };
  struct NarrowMemory {
    alignas(kPanelAlign) Narrow narrow;
    AssignedItems<kItems> assigned;
  };
  struct BothMemory {
    union {
      Wide wide;  // aligned likewise
      Narrow narrow;
    };
    WideStatistics statistics[kBuffers];
    WideBarriers<kStages, kBuffers> barriers;
    AssignedItems<kItems> assigned;
  };
  using Memory = std::conditional_t<kLoads, BothMemory, NarrowMemory>;

  static __device__ __forceinline__ void init_barriers(Memory& memory, bool again) {
    memory.barriers.template init<kDim>(again);
  }

  static __device__ __forceinline__ void run_wide(const Params& p, const WorkItems& items, Memory& memory) {
    WideWarpgroup<T, Kv, kDim, kDim, kStages, Wide, WorkItems>(p, items, memory.wide, memory.statistics, memory.barriers)
        .run();
  }

  template <int kM>
  static __device__ PAT_PASS void run_narrow(const Params& p, const WorkItems& items, Memory& memory) {
    PageWarp<T, Kv, kDim, kM>(p, items, memory.narrow.stages, memory.narrow.statistics).run();
  }
};

}  // namespace pat
