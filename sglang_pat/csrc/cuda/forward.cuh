// The forward kernel. It runs a plan's work items: the output of a query with one part goes to `out`, parts and their
// log-sum-exp go to the workspace for merge.cuh. CTAs are persistent, one an SM: each has some of the plan's bins, one KV
// head at a time (PAT section 6). One kernel has several query tiles (BatchLLM section 4.4 fuses likewise). This is its
// outer loop. A KV format (`Format`; kv/) says how items are loaded and computed:
//
//   Memory                    shared memory
//   kThreads, kItems          threads of the CTA; items of a look-up, for which Memory has room in `assigned`
//   computing(wide), kLoads   how many threads compute in a pass, the first ones; whether there are others, which load wide
//                             items or wait
//   kWideMs, kNarrowMs        query tiles, two sets: of items that all computing threads run together, and of items that
//                             each of kNarrowWarps warps, or a team of them, runs for itself
//   init_barriers             of wide items
//   run_wide, Loader          all wide items of a look-up: their computation, and a class whose `run` loads them
//   run_narrow                all narrow items of kM rows
//   kRegisters                see `PassRegisters`
#pragma once

#include "assign.cuh"
#include "smem.cuh"
#include "wgmma_ptx.cuh"

namespace pat {

#if PAT_WGMMA
#define PAT_PASS __forceinline__  // wgmma does not survive calls
#else
#define PAT_PASS __noinline__  // registers are allocated better for one pass at a time
#endif

// Registers of a thread in a pass, where threads that do not compute give some to those that do: of one that computes wide
// items, of one that computes narrow ones, of the others in a pass with wide items and in one with narrow items. Multiples
// of eight, at least 24 (PTX ISA, `setmaxnreg`); all 0 where nobody gives any.
struct PassRegisters {
  int wide = 0, narrow = 0, load = 0, idle = 0;
};

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
template <typename Format>
__global__ void __launch_bounds__(Format::kThreads, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<typename Format::Memory*>(bytes);
  static_assert(sizeof(memory) <= kSharedLimit);
  constexpr bool kHasWide = Format::kWideMs != 0, kHasNarrow = Format::kNarrowMs != 0;
  constexpr PassRegisters kRegisters = Format::kRegisters;
  constexpr bool kTrades = kRegisters.wide > 0;
  // Else ptxas wants every change within a branch, and all code between it and the next change too.
  constexpr bool kSameForBoth = kRegisters.wide == kRegisters.narrow;
  launch_dependents();
  Items<Format::kItems> items(p, memory.assigned);
  // No barrier between the two: every warp has its own memory, and each kind of items its own team barriers.
  const auto single = [&] {
    if constexpr ((Format::kNarrowMs & tile_bit(kSingleM)) != 0) {
      if (items.count(kSingle) > 0) Format::template run_narrow<kSingleM>(p, items, memory);
    }
  };
  const auto narrow = [&] {
    if constexpr ((Format::kNarrowMs & tile_bit(kNarrowM)) != 0) {
      if (items.count(kNarrow) > 0) Format::template run_narrow<kNarrowM>(p, items, memory);
    }
  };
#pragma unroll 1
  for (int from = 0;;) {
    if (from != kSameLookUp) {
      if constexpr (kHasWide) Format::init_barriers(memory, from > 0);
      items.template look_up<Format::kNarrowWarps, Format::kThreads>(from, Format::kWideMs | Format::kNarrowMs);
      wait_for_primary();
    }
    // A shuffle tells the compiler that the value is uniform in a warp (wide.cuh, `this_warpgroup`).
    const bool wide =
        kHasWide &&
        (!kHasNarrow || __shfl_sync(~0u, items.count(kWide) > 0 && (from == kSameLookUp) == items.wide_last(), 0));
    // Whether the other kind of items is left after this pass.
    const auto pass_left = [&](bool ran_wide) -> int {
      if constexpr (!kHasWide || !kHasNarrow) return false;
      return items.wide_last() ? !ran_wide & (items.count(kWide) > 0) : ran_wide;
    };
    // Which kind ran. `fresh` hides the value from the compiler, so that it keeps the branches' code apart and in its place
    // in memory.
    uint32_t ran_wide;
    if (!Format::kLoads || thread_of_cta() < Format::computing(wide)) {
      if constexpr (kTrades && kSameForBoth) {
        grow_registers<kRegisters.wide>();
        arrive_threads(wide ? kGrownInWide : kGrownInNarrow, Format::kThreads);
      }
      if (wide) {
        if constexpr (!kSameForBoth) {
          grow_registers<kRegisters.wide>();
          arrive_threads(kGrownInWide, Format::kThreads);
        }
        if constexpr (kHasWide) Format::run_wide(p, items, memory);
        ran_wide = fresh(1u);
      } else {
        if constexpr (!kSameForBoth) {
          grow_registers<kRegisters.narrow>();
          arrive_threads(kGrownInNarrow, Format::kThreads);
        }
        if constexpr (!Variant::kMasks) single();
        if constexpr (!kSameForBoth) narrow();
        ran_wide = fresh(0u);
      }
      if (ran_wide == 0) {
        if constexpr (Variant::kMasks) single();
        if constexpr (kSameForBoth) narrow();
        ran_wide = fresh(0u);  // not kept in a register meanwhile
      }
      const bool left = pass_left(ran_wide != 0);
      if (!left & !items.more()) break;
      from = left ? kSameLookUp : items.next();
      if constexpr (kTrades) {
        sync_threads(kRegistersBarrier, Format::computing(wide));  // as PTX demands between two changes
        shrink_registers<first_registers(Format::kThreads)>();
      }
    } else {
      if constexpr (kTrades && kSameForBoth) shrink_registers<kRegisters.load>();
      if (wide) {
        if constexpr (!kSameForBoth) shrink_registers<kRegisters.load>();
        if constexpr (kHasWide && Format::kLoads) {
          typename Format::Loader{p, items, memory}.run();
          wait_copies<0>();
        }
        if constexpr (kTrades) sync_threads(kGrownInWide, Format::kThreads);
        ran_wide = fresh(1u);
      } else {
        if constexpr (!kSameForBoth) shrink_registers<kRegisters.idle>();
        if constexpr (kTrades) sync_threads(kGrownInNarrow, Format::kThreads);
        ran_wide = fresh(0u);
      }
      const bool left = pass_left(ran_wide != 0);
      if (!left & !items.more()) break;
      from = left ? kSameLookUp : items.next();
      if constexpr (kTrades) grow_registers<first_registers(Format::kThreads)>();
    }
    __syncthreads();
  }
}

// The kernel of a format; kv/latent.cuh has one of its own.
template <typename Format>
constexpr auto kForwardOf = forward<Format>;

}  // namespace pat
