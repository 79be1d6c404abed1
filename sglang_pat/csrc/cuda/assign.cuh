// Looks up a CTA's work items in the plan and keeps them in shared memory, in order of kind (`AssignedItems`). Each thread
// looks up one item, so that the chain of dependent loads (plan, lengths, rows, slots) is waited for once in a pass and not
// once for each item. Every forward kernel calls `look_up` at the start of a pass and `get` for each item.
#pragma once

#include <climits>

#include "item.cuh"
#include "ptx.cuh"
#include "teams.h"

namespace pat {

// Items of one look-up.
template <int kThreads>
struct AssignedItems {
  static constexpr int kWords = kThreads / kWarpSize > kItemKinds ? kThreads / kWarpSize : kItemKinds;
  Item items[kThreads];
  uint16_t order[kItemKinds][kThreads];  // indices into items by kind; those that teams share come first
  int count[kItemKinds], shared[kItemKinds];
  TeamPlace places[kWide][kWords];  // of each warp, by kind
  int next;                         // first item of the CTA that was not looked up
  bool parts_stay, wide_last, more;
};

template <int kThreads>
class Items {
  using Assigned = AssignedItems<kThreads>;

 public:
  __device__ Items(const Params& p, Assigned& assigned) : p_(p), assigned_(assigned) {}

  // Looks up the CTA's items from number `first` on and puts those in order whose query tile is in the set `ms`. Every
  // thread has to call it, and nobody may still use the items of the look-up before. `kWarps` warps run narrow items. If
  // the CTA has more threads than there is room for items, only the first kThreads read.
  template <int kWarps, int kCtaThreads = kThreads>
  __device__ void look_up(int first, int ms) {
    static_assert(Assigned::kWords >= kItemKinds && Assigned::kWords >= kWarps);
    const int thread = thread_of_cta(), warp = warp_id();
    if (first == 0) prefetch_tables();
    int found = 0;
    if (kCtaThreads == kThreads || thread < kThreads) {
      const Item item = read(first + thread, ms);
      assigned_.items[thread] = item;
      found = item.kind != kNoItem;
    }
    const int number = __syncthreads_count(found);
    if (thread == 0) {
      assigned_.parts_stay = p_.plan[kNumSlots] >= p_.plan[kBatch];
      assigned_.wide_last = (p_.plan[kNarrowFirst] & blockIdx.x & 1) != 0;  // no branch: the loads are waited for together
      assigned_.more = number == kThreads;
      assigned_.next = first + kThreads;
    }
    // Fast path: a single item needs no sorting. It counts for small batches, which have one
    // (benchmarks/notes/kernels-narrow.md, "What a small batch waits for"). A sliced query fills several entries, of which
    // only the first is an item here if the tile holds all of its rows.
    const bool one = number == p_.row_slices && (number == 1 || assigned_.items[0].m >= p_.group);
    if (one && warp == 0) sort_one<kWarps>();
    if (!one && warp < kItemKinds) sort<kWarps>(ItemKind(warp), number);
    __syncthreads();
  }

  // Takes part in the barriers of a `look_up`, for threads that neither read nor sort: those behind the first kThreads.
  __device__ void join_barriers() const {
    __syncthreads_count(0);
    __syncthreads();
  }

  // Whether the CTA may have more items than were looked up, and the first of those.
  __device__ bool more() const { return assigned_.more; }
  __device__ int next() const { return assigned_.next; }

  // Whether this CTA runs its wide items last (packing/plan.py, `Plan.narrow_first`).
  __device__ bool wide_last() const { return assigned_.wide_last; }

  // Items of a kind; how many of them, counted from the first, teams share; this warp's place in its team.
  __device__ int count(ItemKind kind) const { return assigned_.count[kind]; }
  __device__ int shared(ItemKind kind) const { return assigned_.shared[kind]; }
  __device__ TeamPlace place(ItemKind kind) const { return assigned_.places[kind][warp_id()]; }

  // Whether KV of narrow items is marked evict-first, so that parts stay in the L2 cache until they are merged: most narrow
  // items read their KV once. With many parts (deep trees) this gains 2 to 8 %, with few it would lose 5 %
  // (benchmarks/notes/first-versions.md, "What else was tried").
  __device__ bool parts_stay() const { return assigned_.parts_stay; }

  __device__ const Item& get(ItemKind kind, int i) const { return assigned_.items[assigned_.order[kind][i]]; }

 private:
  // Prefetches the plan and the lengths to L2, some lines by each CTA: otherwise each of the dependent loads of a look-up
  // waits for DRAM.
  __device__ void prefetch_tables() const {
    const int line = int(fresh(blockIdx.x) + lane_id() * gridDim.x);
    if (warp_id() == 0 && line < p_.plan_lines) prefetch(p_.plan + line * kLineBytes / int(sizeof(int32_t)));
    if (warp_id() == 1 && line < p_.length_lines) {
      prefetch(p_.seq_lens + line * kLineBytes / int(sizeof(int64_t)));
      prefetch(p_.rows + line * kLineBytes / int(sizeof(int64_t)));
    }
  }

  // Sums over the items of a kind with up to `longest` tokens. By one warp.
  __device__ ItemSum sum_up(ItemKind kind, int number, int longest) const {
    ItemSum sum = {};
#pragma unroll 1
    for (int i = lane_id(); i < number; i += kWarpSize) {
      const Item& item = assigned_.items[i];
      if (item.kind != kind || item.tokens > longest) continue;
      ++sum.count;
      sum.longest = max(sum.longest, item.tokens);
      sum.tokens += item.tokens;
    }
    return {__reduce_add_sync(~0u, sum.count), __reduce_max_sync(~0u, sum.longest), __reduce_add_sync(~0u, sum.tokens)};
  }

  // The rank of the fastest teams for these items. By one warp; each lane rates one team size.
  template <int kWarps>
  __device__ uint32_t best_teams(const ItemSum& items) const {
    return __reduce_min_sync(~0u, team_rank<kWarps>(lane_id(), items));
  }

  // Orders the items of a kind, those that teams share first, and chooses the teams. By one warp.
  template <int kWarps>
  __device__ void sort(ItemKind kind, int number) {
    const int lane = lane_id();
    ItemSum all_sum = {}, own_sum = {};  // all items of the kind; those that one warp runs alone
    int longest_own = INT_MAX;           // longer items are shared
    int extra_shared = 0;                // shared although they are not longer
    int shared = 0;                      // items that teams share, both kinds
    uint32_t best = 0;                   // rank of the best teams (teams.h), in the end for the shared items
    // With the long items shared, few may be left for single warps, and then the longest of those is too long again:
    // repeat. A loop, so that its code is there once.
#pragma unroll 1
    for (bool converged = false;;) {
      if (!converged) own_sum = sum_up(kind, number, longest_own);
      if (longest_own == INT_MAX) all_sum = own_sum;
      if (kind == kWide || all_sum.count == 0) break;
      const bool last = converged || own_sum.longest == 0;
      shared = all_sum.count - own_sum.count + extra_shared;
      best = best_teams<kWarps>(
          last ? ItemSum{shared, all_sum.longest, all_sum.tokens - own_sum.tokens + extra_shared * own_sum.longest}
               : own_sum);
      if (last) break;
      const int left = left_over<kWarps>(own_sum), own = own_tokens<kWarps>(best, own_sum, left);
      converged = own_sum.longest <= own;
      if (converged)
        extra_shared = left;
      else
        longest_own = own;
    }
    int next_shared = 0, next_own = shared;  // places in the order
#pragma unroll 1
    for (int first = 0; first < number; first += kWarpSize) {
      const int i = first + lane;
      const bool ours = i < number && assigned_.items[i].kind == kind;
      const bool is_short = ours && assigned_.items[i].tokens <= longest_own;
      const uint32_t before = (1u << lane) - 1, short_ones = __ballot_sync(~0u, is_short);
      const bool own = is_short && __popc(short_ones & before) >= extra_shared;
      extra_shared = max(0, extra_shared - __popc(short_ones));
      const uint32_t own_bits = __ballot_sync(~0u, own), shared_bits = __ballot_sync(~0u, ours) & ~own_bits;
      const int place = own ? next_own + __popc(own_bits & before) : next_shared + __popc(shared_bits & before);
      if (ours) assigned_.order[kind][place] = uint16_t(i);
      next_own += __popc(own_bits), next_shared += __popc(shared_bits);
    }
    if (lane == 0) assigned_.count[kind] = all_sum.count, assigned_.shared[kind] = shared;
    if (shared > 0 && lane < kWarps) assigned_.places[kind][lane] = team_place<kWarps>(best, lane);
  }

  // `sort` for a single item: all warps share it if it is long. By one warp.
  template <int kWarps>
  __device__ void sort_one() {
    const int lane = lane_id();
    const Item& item = assigned_.items[0];
    const int time = team_time<kWarps>(kWarps, {1, item.tokens, item.tokens});
    const bool shared = item.kind < kWide && item.tokens > time;
    if (lane < kItemKinds) {
      const bool ours = item.kind == lane;
      assigned_.count[lane] = ours;
      assigned_.shared[lane] = ours && shared;
      assigned_.order[lane][0] = 0;
    }
    if (shared && lane < kWarps) assigned_.places[item.kind][lane] = {uint8_t(kWarps), uint8_t(lane), 1, 0};
  }

  // Item number `index` of the CTA. Each item of the plan counts as `row_slices`; where its tile holds all rows of a query,
  // only the first of them is an item.
  __device__ __forceinline__ Item read(int index, int ms) const {
    Item item = {};
    item.kind = kNoItem;
    const int32_t* bins = p_.plan + kHeaderSize;
    const int num_tasks = p_.plan[kNumBins] * p_.runs, items = p_.plan[kItems];
    int task = int(fresh(blockIdx.x)), bin = 0, at = -1;
    const int number = quotient(index, p_.row_slices), slice = index - number * p_.row_slices;
    for (int rest = number; task < num_tasks; task += gridDim.x) {
      bin = quotient(task, p_.runs);
      const int begin = bins[bin], count = bins[bin + 1] - begin;
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
    // Negative bounds count back from the request's end (packing/plan.py, `position`).
    const int from_end = row[kEnd] < 0 ? int(p_.seq_lens[item.query]) - kOpen : 0;
    int start = row[kStart] < 0 ? max(0, from_end + row[kStart]) : row[kStart];
    if constexpr (Variant::kLimits) {
      // The start alone counts back where a window begins within a piece.
      if (row[kStart] < 0 && row[kEnd] >= 0) start = max(0, int(p_.seq_lens[item.query]) - kOpen + row[kStart]);
    }
    const int end = row[kEnd] < 0 ? max(0, from_end + row[kEnd]) : row[kEnd];
    item.slots = p_.rows[item.query] * p_.table_row + start;
    item.tokens = max(0, end - start);
    item.first = row[kFirstQuery];
    if constexpr (Variant::kTails) item.tails = row[kTails] != 0;
    if constexpr (Variant::kMasks) item.draft = item.tails ? uint8_t(p_.draft) : draft_tokens(item.query, end);
    item.count = uint8_t(row[kItemQueries]);
    item.m = uint8_t(row[kTileM]);
    const int run = task - bin * p_.runs, head = quotient(run, p_.splits), split = run - head * p_.splits;
    item.kv.head = uint16_t(Variant::kStraddles ? row[kTileM] >> kFirstRowShift : head);
    if constexpr (Variant::kLimits) align(item.kv, item, start);
    item.first_head = uint16_t(head * p_.kv_group + min(split * p_.group, p_.kv_group - p_.group));
    item.kind = uint8_t((ms >> item.m / 8 & 1) != 0 ? kind_of(item.m) : kItemKinds);
    if (p_.row_slices > 1) {
      if (item.m < p_.group)
        item.first_head += uint16_t(min(slice * item.m, p_.group - item.m));
      else if (slice > 0)
        item.kind = kItemKinds;
      if (item.kind == kItemKinds) return item;
    }
    if constexpr (kLooksUpTails) {
      if (item.tails && item.kind == kWide) look_up_tails(item, end);
    }
    if (Variant::kMasks && item.draft > 0) prefetch(p_.masks + int64_t(item.query) * p_.draft);
    // The KV slots are read next, by a warp that does not know its item yet.
#pragma unroll 1
    for (int i = 0; i < min(item.tokens, kAhead); i += kAheadStep) prefetch(p_.req_to_token + item.slots + i);
    return item;
  }

  // Lets an item that begins at position `start`, where a window does, begin at the last multiple of kTokens in front of it, so
  // that a row's sums do not depend on which rows are computed along with it. A template, because only some modules' items
  // have hidden tokens.
  template <typename Kv>
  __device__ void align(Kv& kv, Item& item, int start) const {
    const int hidden = Variant::kBatchInvariant && item.tokens > 0 ? start % kTokens : 0;
    kv.hidden = uint16_t(hidden);
    item.slots -= hidden;
    item.tokens += hidden;
  }

  // Fills `LookedUpTails` for tails that begin at `end`. A template, because only some modules' items have them.
  template <typename AnyItem>
  __device__ void look_up_tails(AnyItem& item, int end) const {
    item.tail_tokens[0] = max(0, int(p_.seq_lens[item.query]) - end);
    if (item.count < 2) return;
    const int query = query_of(p_, item, 1);
    item.second_tail = p_.rows[query] * p_.table_row + end;
    item.tail_tokens[1] = max(0, int(p_.seq_lens[query]) - end);
  }

  // How many of the tokens before `end` belong to the query's draft. More than the item has if it begins inside the draft.
  __device__ uint8_t draft_tokens(int query, int end) const {
    return uint8_t(min(kMostDraft, max(0, end - int(p_.seq_lens[query] - p_.draft))));
  }

  static constexpr int kAhead = 128, kAheadStep = 32;  // slots to prefetch, and slots of a cache line

  const Params& p_;
  Assigned& assigned_;
};

}  // namespace pat
