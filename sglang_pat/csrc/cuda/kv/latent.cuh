// The forward kernel for latents (MLA) on Hopper: every work item is computed by two warpgroups together, with four producer
// warps. They take the scores of an item's KV tiles by turns. Each leaves its tile's weights and maxima for the other, and
// both multiply all weights, each with its half of V's columns, in the order of the tiles. So one warpgroup's softmax
// overlaps the other's products, and its own with the tile before. module.cu launches it. Why so:
// benchmarks/notes/latents.md, "Order of a tile's products".
#pragma once

#include "../forward.cuh"
#include "latent_narrow.cuh"
#include "latent_wide.cuh"

namespace pat {

constexpr int kLatentNarrowM = 32;  // rows of the largest narrow item
// Registers of a thread. setmaxnreg takes multiples of eight, and the pool is what the CTA started with.
constexpr int kLatentLoadRegisters = kHas8BitKv ? 88 : 56;  // what is converted waits in registers
constexpr int kLatentComputeRegisters =
    (first_registers(kLatentThreads) * kLatentThreads - kLatentLoadRegisters * kLatentProducers) / kLatentComputing / 8 * 8;

// Runs a wide or narrow item, by one of the two warpgroups; so many KV tiles went through the ring before.
template <typename Rows, typename Memory>
__device__ __forceinline__ void run_latent_item(const Params& p, const Item& item, Memory& memory,
                                                const LatentCursor& queries, int warpgroup, int tiles_before) {
  Rows rows(p, memory, queries.item(), queries.first_row(item.m), warpgroup);
  const int tiles = tiles_of(item.tokens);
  int left = item.tokens - warpgroup * kTokens;
  const auto stages_of = [&](int tile) { return LatentStages(memory.barriers.ring, unsigned(tiles_before + tile)); };
  const auto wait_published = [&] { sync_threads(kPublishedBarrier + 1 - warpgroup, kLatentComputing); };
  const auto release = [&](const LatentStages& stages) { stages.release(warpgroup), stages.release(kRope); };
  int tile = warpgroup;
#pragma unroll 1
  for (; tile < tiles; tile += kLatentWarpgroups) {
    const LatentStages own = stages_of(tile), before = stages_of(tile - 1);
    if (tile > 0) {
      wait_published();
      rows.receive(before);
      rows.start_others_values(before);
    }
    rows.start_scores(own);
    wgmma_wait<1>();
    if (tile > 0) release(before);
    wgmma_wait<0>();
    rows.weigh(left, item);
    rows.publish(own);
    arrive_threads(kPublishedBarrier + warpgroup, kLatentComputing);
    rows.start_own_values(own);
    wgmma_wait<0>();
    release(own);
    left -= kLatentWarpgroups * kTokens;
  }
  // The other warpgroup may have the last tile.
  if (tile == tiles && tiles > 0) {
    const LatentStages last = stages_of(tiles - 1);
    wait_published();
    rows.receive(last);
    rows.start_others_values(last);
    wgmma_wait<0>();
    release(last);
  }
  rows.finish();
}

// The items of one look-up, by one of the two warpgroups.
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__device__ __forceinline__ void run_latent_items(const Params& p, const Items<kLatentItems>& items,
                                                 LatentMemory<kDim, kVDim>& memory) {
  const int warpgroup = __shfl_sync(~0u, thread_of_cta() / kWarpgroupThreads, 0);
  LatentCursor queries(memory.barriers.queries);
  int tiles_before = 0;
  while (queries.item() < items.count(kWide)) {
    const Item& item = items.get(kWide, queries.item());
    const auto narrow = [&](auto m) {
      if constexpr ((kMs & tile_bit(m)) != 0)
        run_latent_item<LatentNarrowRows<T, Kv, kDim, kVDim, m>>(p, item, memory, queries, warpgroup, tiles_before);
    };
    const int m = __shfl_sync(~0u, int(item.m), 0);
    queries.wait_full(m);
    fence_async_proxy();
    if (m == kWarpgroupRows) {
      if constexpr ((kMs & tile_bit(kWarpgroupRows)) != 0)
        run_latent_item<LatentWideRows<T, Kv, kDim, kVDim>>(p, item, memory, queries, warpgroup, tiles_before);
    } else if (m == kLatentNarrowM) {
      narrow(std::integral_constant<int, kLatentNarrowM>());
    } else if (m == kNarrowM) {
      narrow(std::integral_constant<int, kNarrowM>());
    } else {
      narrow(std::integral_constant<int, kSingleM>());
    }
    tiles_before += tiles_of(item.tokens);
    queries.for_empty(m, [](uint32_t barrier) { arrive(barrier); });
    queries.advance(m);
  }
}

// Branches stand in reverse order, as in forward.cuh, so that what small batches run comes first in memory: look-up,
// producers, items of 8, 16 and 32 rows, wide ones, and last the look-up of more items. The loop is its own: in that of
// forward.cuh, around both roles, ptxas serializes the products of wide items, as if they had the registers that the kernel
// starts with (nvcc 13.0).
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
__global__ void __launch_bounds__(kLatentThreads, 1) forward_latents(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  using Memory = LatentMemory<kDim, kVDim>;
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit);
  launch_dependents();
  memory.barriers.init(false);
  Items<kLatentItems> items(p, memory.assigned);
  items.template look_up<1, kLatentThreads>(0, kMs);
  wait_for_primary();
  if (thread_of_cta() < kLatentComputing) {
    grow_registers<kLatentComputeRegisters>();
    int first_item = 0;
    while (true) {
      run_latent_items<T, Kv, kDim, kVDim, kMs>(p, items, memory);
      if (!items.more()) break;
      __syncthreads();
      memory.barriers.init(true);  // by the first threads
      items.template look_up<1, kLatentThreads>(first_item += kLatentItems, kMs);
    }
  } else {
    shrink_registers<kLatentLoadRegisters>();
    while (true) {
      LatentProducer<T, Kv, kDim, kVDim>(p, items, memory).run();
      if (!items.more()) break;
      __syncthreads();
      items.join_barriers();
    }
  }
}

// For kernels.cuh.
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
struct LatentKv {
  using Memory = LatentMemory<kDim, kVDim>;
  static constexpr int kThreads = kLatentThreads, kRecordBytes = 0;
};
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
constexpr auto kForwardOf<LatentKv<T, Kv, kDim, kVDim, kMs>> = forward_latents<T, Kv, kDim, kVDim, kMs>;

}  // namespace pat
