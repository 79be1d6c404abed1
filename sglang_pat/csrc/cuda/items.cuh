// The work items of a worker: its threads look up as many of them as they are, one each, and keep them in shared memory.
// So the loads that depend on each other, from the plan to the KV slots, are waited for only once.
#pragma once

#include "params.cuh"
#include "ptx.cuh"
#include "teams.h"

namespace pat {

// A work item of one KV head.
struct Item {
  int64_t slots;  // where its first KV slot is in req_to_token
  int tokens;
  int first;   // of the plan's queries and slots
  int query;   // batch position of the first
  int target;  // where its part goes
  int16_t count;  // queries
  int16_t m;      // tile
  int16_t head;
};

// The phases of the forward kernel, each with the items of its tiles.
enum Phase { kSingle, kNarrow, kWide, kPhases };

__device__ constexpr Phase phase_of(int m) { return m == kSingleM ? kSingle : m == kNarrowM ? kNarrow : kWide; }

// What the threads of a CTA have looked up.
template <int kThreads>
struct ItemWindow {
  static constexpr int kWords = kThreads / kWarpSize;
  Item items[kThreads];
  uint16_t order[kPhases][kThreads];  // the items of each phase: first those that warps share
  TeamPlace places[kWide][kWords];    // of each warp
  bool parts_stay, more;
  // Of each phase's items that are one warp's: which of its own each warp looked up, and how many the warps before it did.
  struct Found {
    uint32_t bits;
    int tokens, longest;
  } found[kPhases][kWords];
  int before[kPhases][kWords];
  struct Sum {
    int count, tokens, longest;
  } all[kPhases], alone[kPhases];  // of all items, and of those that are one warp's
};

template <int kThreads>
class Items {
  using Window = ItemWindow<kThreads>;

 public:
  __device__ Items(const Params& p, Window& window) : p_(p), window_(window) {}

  // Looks up the worker's items from `first` on, those whose tile is one of `ms`. Every thread has to call it; what was
  // looked up before must not be in use any more. `kWarps` are there for items of up to 16 rows.
  template <int kWarps>
  __device__ void look_up(int first, int ms) {
    const int thread = thread_of_cta(), lane = lane_id(), warp = warp_id();
    const Item item = read(first + thread);
    window_.items[thread] = item;
    if (thread == 0) window_.parts_stay = p_.plan[kNumSlots] >= p_.plan[kBatch];
    static_assert(Window::kWords >= kPhases && Window::kWords >= kWarps);
    const bool ours = item.m != 0 && (ms >> item.m / 8 & 1) != 0;
    // Not one of `ms`, or no item at all: in no phase.
    const int phase = int(fresh(unsigned(ours ? phase_of(item.m) : item.head >= 0 ? kPhases : kPhases + 1)));
    const int tokens = item.tokens;
    bool alone = true;
    int place = 0, place_of_all = 0;  // how many of its phase are before it
    for (bool begun = false;; begun = true) {
      uint32_t own_bits = 0;
#pragma unroll
      for (int i = 0; i < kPhases; ++i) {
        const bool counts = alone && phase == i;
        const uint32_t bits = __ballot_sync(~0u, counts);
        const int sum = i == kWide ? 0 : __reduce_add_sync(~0u, counts ? tokens : 0);
        const int longest = i == kWide ? 0 : __reduce_max_sync(~0u, counts ? tokens : 0);
        if (phase == i) own_bits = bits;
        if (lane == 0) window_.found[i][warp] = {bits, sum, longest};
      }
      const bool full = __syncthreads_and(phase <= kPhases);
      if (thread == 0) window_.more = full;
      if (warp < kPhases) sum_up(warp, !begun);
      __syncthreads();
      bool shares = false;
      if (phase < kPhases) {
        place = window_.before[phase][warp] + __popc(own_bits & (1u << lane) - 1);
        if (!begun) place_of_all = place;
        const typename Window::Sum sum = window_.alone[phase];
        shares = alone && phase != kWide && too_long<kWarps>(tokens, sum.count, sum.longest, sum.tokens);
      }
      // What is left for single warps when the long ones are shared may be few, and then too long again.
      if (!__syncthreads_or(shares)) break;
      alone = alone && !shares;
    }
    if (phase < kPhases)
      window_.order[phase][alone ? shared(Phase(phase)) + place : place_of_all - place] = uint16_t(thread);
    if (lane < kWide && warp < kWarps) {
      // The longest are shared.
      const typename Window::Sum all = window_.all[lane];
      const int tokens_shared = all.tokens - window_.alone[lane].tokens;
      window_.places[lane][warp] = best_team<kWarps>(warp, shared(Phase(lane)), all.longest, tokens_shared).place;
    }
    __syncthreads();
  }

  // Whether there may be items that have not been looked up.
  __device__ bool more() const { return window_.more; }

  // How many there are for a phase; how many of them, the first ones, teams share, and of which team this warp is.
  __device__ int count(Phase phase) const { return window_.all[phase].count; }
  __device__ int shared(Phase phase) const { return window_.all[phase].count - window_.alone[phase].count; }
  __device__ TeamPlace place(Phase phase) const { return window_.places[phase][warp_id()]; }

  // Whether there are so many parts that KV, which most narrow items read for the only time, should make place for them in
  // the L2 cache until they are merged. Deep trees gain 2 to 8 %; where there are few parts 5 % would be lost
  // (benchmarks/NOTES.md).
  __device__ bool parts_stay() const { return window_.parts_stay; }

  __device__ const Item& get(Phase phase, int i) const { return window_.items[window_.order[phase][i]]; }

 private:
  // Of a phase's items that are one warp's, what the warps found; at first that is all.
  __device__ __forceinline__ void sum_up(int phase, bool all) {
    const int lane = lane_id();
    const bool valid = lane < Window::kWords;
    const typename Window::Found found = valid ? window_.found[phase][lane] : typename Window::Found{};
    int count = __popc(found.bits);
#pragma unroll
    for (int step = 1; step < Window::kWords; step *= 2) {
      const int other = __shfl_up_sync(~0u, count, step);
      count += lane >= step ? other : 0;
    }
    if (valid) window_.before[phase][lane] = count - __popc(found.bits);
    const int tokens = __reduce_add_sync(~0u, found.tokens), longest = __reduce_max_sync(~0u, found.longest);
    if (lane == Window::kWords - 1) {
      window_.alone[phase] = {count, tokens, longest};
      if (all) window_.all[phase] = {count, tokens, longest};
    }
  }

  // The worker's item `index`; one without a tile, for no head, behind the last.
  __device__ __forceinline__ Item read(int index) const {
    Item item = {};
    item.head = -1;
    const int32_t* bins = p_.plan + kHeaderSize;
    const int num_tasks = p_.plan[kNumBins] * p_.kv_heads, items = p_.plan[kItems];
    int task = blockIdx.x, at = -1;
    for (int rest = index; task < num_tasks; task += gridDim.x) {
      const int32_t* bin = bins + task / p_.kv_heads;
      const int begin = bin[0], count = bin[1] - begin;
      if (rest < count) {
        at = begin + rest;
        break;
      }
      rest -= count;
    }
    if (at < 0) return item;
    const int32_t* row = p_.plan + items + at * kItemSize;
    item.query = row[kQuery];
    item.target = row[kSlot];
    const int end = row[kEnd] == kOpen ? int(p_.seq_lens[item.query]) : row[kEnd];
    item.slots = p_.rows[item.query] * p_.table_row + row[kStart];
    item.tokens = max(0, end - row[kStart]);
    item.first = row[kFirstQuery];
    item.count = int16_t(row[kItemQueries]);
    item.m = int16_t(row[kTileN] == kTokens ? row[kTileM] : 0);
    item.head = int16_t(task % p_.kv_heads);
    return item;
  }

  const Params& p_;
  Window& window_;
};

// Batch position of an item's `member`-th query; the first one was looked up with the item.
__device__ __forceinline__ int query_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.query : p.section(kQueries)[item.first + member];
}

// Where its part goes.
__device__ __forceinline__ int target_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.target : p.section(kSlots)[item.first + member];
}

// Q of the tile's row `row`, which is of the query `query`.
template <typename T>
__device__ __forceinline__ const T* q_row(const Params& p, const Item& item, int query, int row) {
  const int64_t head = item.head * p.group + p.head_of(row);
  return static_cast<const T*>(p.q) + query * p.q_row + head * p.q_head;
}

}  // namespace pat
