// KV of 16 or 8 bits, as in SGLang's own pools: narrow items by single warps (plain_narrow.cuh), wide items by warpgroups
// with a producer (wide.cuh; plain_copy.cuh for 16 bits, plain_convert.cuh or plain_direct.cuh for 8).
#pragma once

#include "../forward.cuh"
#include "../wide.cuh"
#include "plain_convert.cuh"
#include "plain_direct.cuh"
#include "plain_narrow.cuh"

namespace pat {

// A format of forward.cuh, for query tiles of the set `kMs`. V may be narrower than K.
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
struct PlainKv {
  static constexpr int kThreads = threads(kDim), kItems = kThreads, kRecordBytes = 0;
  static constexpr int kWideMs = kMs & kWideTiles, kNarrowMs = kMs & ~kWideTiles;
  static constexpr bool kLoads = true;
  static constexpr bool kConvertsDirectly = converts_directly(kDim);
  static constexpr int computing(bool wide) {
    return (wide ? warpgroups(kDim) : narrow_warpgroups(kDim)) * kWarpgroupThreads;
  }
  // Where two warpgroups convert directly they hold KV beside one that computes, and of two with narrow items the third is
  // idle: 248 + 2 * 128 and 2 * 240 + 24 are what three have at the start, 168 each.
  static constexpr PassRegisters kDirectRegisters = {248, 240, 128, 24};
  static constexpr PassRegisters kOthersRegisters = {kComputeRegisters<kDim>, kComputeRegisters<kDim>, kLoadRegisters,
                                                     kLoadRegisters};
  static constexpr PassRegisters kRegisters = kConvertsDirectly       ? kDirectRegisters
                                              : Variant::kArch == 900 ? kOthersRegisters
                                                                      : PassRegisters{};

  // Bytes for items, statistics, barriers and alignment.
  static constexpr int kRest = int(sizeof(AssignedItems<kItems>)) + (4 << 10);
  static constexpr bool kConverts = Kv::kBytes == 1 && !kConvertsDirectly;  // by bytes that wait in shared memory
  static constexpr int kBuffers = query_buffers(kConverts);
  static constexpr int kQueries = kBuffers * int(sizeof(WideQueries<kDim>));
  static constexpr int kFree = kSharedLimit - kRest - kQueries;
  // More than eight stages, K and V of four tiles, gain nothing. 8-bit KV waits for its conversion beside the ring.
  static constexpr int kStages = kConverts ? kFewestStages<kDim> : std::min(8, kFree / kStageBytes<kDim> / 2 * 2);
  static constexpr int kAhead =
      kConverts ? std::min(8, (kFree - kStages * kStageBytes<kDim>) / kAheadBytes<kDim> / converting_warpgroups(kDim)) : 0;
  // Whole warpgroups of them. Of two groups, of the second one also some: more KV is in flight then. An even number, which
  // teams can divide.
  static constexpr int kWarpsAtATime = narrow_warpgroups(kDim) == 2 ? 2 : kWarpgroupWarps;
  static constexpr int kNarrowWarps =
      std::min(narrow_warpgroups(kDim) * kWarpgroupWarps,
               (kSharedLimit - kRest) / NarrowSizes<Kv, kDim, kVDim>::kWarp / kWarpsAtATime * kWarpsAtATime);
  static_assert(kVDim <= kDim && kVDim % 32 == 0);
  static_assert((kMs & ~(2 * tile_bit(wide_warpgroups(kDim) * kWarpgroupRows) - 1)) == 0);
  static_assert(kStages >= kFewestStages<kDim> && kNarrowWarps > 0 && (!kConverts || kAhead > 0));
  static_assert((Kv::kBytes == 1) == kHas8BitKv);
  // Else a set's stage would lie beyond the ring, and the warpgroups want more registers than there are.
  static_assert(!kConvertsDirectly || (warpgroups(kDim) == 1 && kStages >= kDirectSets));

  using WorkItems = Items<kItems>;
  using Wide = WideMemory<kDim, kStages, kAhead>;

  // Wide and narrow items use the same bytes, one kind at a time. Swizzled panels need 1,024-byte alignment.
  struct Memory {
    struct Narrow {
      alignas(1024) uint8_t chunks[kNarrowWarps * NarrowSizes<Kv, kDim, kVDim>::kWarp];
      NarrowStatistics<kNarrowWarps> statistics;
    };
    union {
      Wide wide;
      Narrow narrow;
    };
    WideStatistics statistics[kBuffers];
    WideBarriers<kStages, kBuffers> barriers;
    AssignedItems<kItems> assigned;
  };

  static __device__ __forceinline__ void init_barriers(Memory& memory, bool again) {
    memory.barriers.template init<kDim>(again);
  }

  static __device__ PAT_PASS void run_wide(const Params& p, const WorkItems& items, Memory& memory) {
    if (!two_convert(kDim) || thread_of_cta() < wide_warpgroups(kDim) * kWarpgroupThreads) {
      WideWarpgroup<T, Kv, kDim, kVDim, kStages, Wide, WorkItems>(p, items, memory.wide, memory.statistics, memory.barriers)
          .run();
    } else {
      if constexpr (two_convert(kDim)) convert<ProducerRole::kV>(p, items, memory);
    }
  }

  struct Converts {
    const Params& p;
    const WorkItems& items;
    Memory& memory;

    __device__ __forceinline__ void run() const {
      constexpr auto kRole = two_convert(kDim) ? ProducerRole::kK : ProducerRole::kKAndV;
      ConvertingProducer<T, Kv, kDim, kVDim, kStages, kAhead, kRole>(p, items, memory.wide, memory.barriers).run();
    }
  };
  using Loader = std::conditional_t<kConvertsDirectly, DirectProducer<T, Kv, kDim, kVDim, kStages>,
                                    std::conditional_t<kConverts, Converts, Producer<T, kDim, kVDim, kStages>>>;

  template <int kM>
  static __device__ PAT_PASS void run_narrow(const Params& p, const WorkItems& items, Memory& memory) {
    if (threadIdx.x / kWarpSize < kNarrowWarps)
      NarrowWarp<T, Kv, kDim, kVDim, kM, kNarrowWarps>(p, items, memory.narrow.chunks, memory.narrow.statistics).run();
  }

 private:
  template <ProducerRole kRole>
  static __device__ __forceinline__ void convert(const Params& p, const WorkItems& items, Memory& memory) {
    ConvertingProducer<T, Kv, kDim, kVDim, kStages, kAhead, kRole>(p, items, memory.wide, memory.barriers).run();
    wait_copies<0>();
  }
};

}  // namespace pat
