// The work items of a worker: its threads look up as many of them as they are, one each, and keep them in shared memory.
// So the loads that depend on each other, from the plan to the KV slots, are waited for only once.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

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

// Tokens above which an item of up to 16 rows is for all warps together, where there are `count` such items with `total`
// tokens. If each is one warp's, the last warp ends after as many rounds as they make; if all warps share each, all end at
// the same time, but summing up takes as long as 24 tokens of one warp (1.5 us; 32 tokens take one 2 us,
// benchmarks/NOTES.md).
constexpr int kSumTokens = 24;
__device__ __forceinline__ int alone_tokens(int count, int total, int warps) {
  return (total / warps + kSumTokens * count) / max(1, (count + warps - 1) / warps);
}

// What the threads of a CTA have looked up.
template <int kThreads>
struct ItemWindow {
  static constexpr int kWords = kThreads / kWarpSize;
  Item items[kThreads];
  uint16_t order[kPhases][kThreads];  // the items of each phase: first those for all warps
  int counts[kPhases], shared[kPhases];
  bool parts_stay;
  // Of a warp's items, which are one warp's and which for all of them, as bits; and the tokens of the former.
  struct Words {
    uint32_t alone, shared;
    int tokens;
  } words[kPhases][kWords];
};

template <int kThreads>
class Items {
  using Window = ItemWindow<kThreads>;

 public:
  __device__ Items(const Params& p, Window& window) : p_(p), window_(window) {}

  // Looks up the worker's items from `first` on, those whose tile is one of `ms`. Every thread has to call it; what was
  // looked up before must not be in use any more. `warps` are there for items of up to 16 rows. Whether there may be more.
  __device__ bool look_up(int first, int ms, int warps) {
    const int thread = thread_of_cta(), lane = lane_id(), warp = warp_id();
    const Item item = read(first + thread);
    const bool ours = item.m != 0 && (ms >> item.m / 8 & 1) != 0;
    const Phase phase = phase_of(item.m);
    window_.items[thread] = item;
    if (thread < kPhases) window_.counts[thread] = window_.shared[thread] = 0;
    if (thread == 0) window_.parts_stay = p_.plan[kNumSlots] >= p_.plan[kBatch];
    bool shared = false, full;
    while (true) {
      const bool alone = ours && !shared;
#pragma unroll
      for (int i = 0; i < kPhases; ++i) {
        const uint32_t alone_bits = __ballot_sync(~0u, alone && phase == i);
        const uint32_t shared_bits = __ballot_sync(~0u, shared && phase == i);
        const int tokens = __reduce_add_sync(~0u, alone && phase == i ? item.tokens : 0);
        if (lane == 0) window_.words[i][warp] = {alone_bits, shared_bits, tokens};
      }
      full = __syncthreads_and(item.head >= 0);
      int count = 0, total = 0;
#pragma unroll
      for (int i = 0; i < Window::kWords; ++i) {
        count += __popc(window_.words[phase][i].alone);
        total += window_.words[phase][i].tokens;
      }
      // What is left for single warps when the long ones are for all may be few, and then too long again.
      const bool too_long = alone && phase != kWide && item.tokens > alone_tokens(count, total, warps);
      if (!__syncthreads_or(too_long)) break;
      shared = shared || too_long;
    }
    int place = 0, all_alone = 0, all_shared = 0;  // where it is among its kind, and how many there are of each
#pragma unroll
    for (int i = 0; i < Window::kWords; ++i) {
      const auto words = window_.words[phase][i];
      const uint32_t before = i < warp ? ~0u : i == warp ? (1u << lane) - 1 : 0;
      place += __popc((shared ? words.shared : words.alone) & before);
      all_alone += __popc(words.alone);
      all_shared += __popc(words.shared);
    }
    if (ours) {
      window_.order[phase][shared ? place : all_shared + place] = uint16_t(thread);
      window_.counts[phase] = all_alone + all_shared;
      window_.shared[phase] = all_shared;
    }
    __syncthreads();
    return full;
  }

  // How many there are for a phase, and how many of them, the first ones, for all warps together.
  __device__ int count(Phase phase) const { return window_.counts[phase]; }
  __device__ int shared(Phase phase) const { return window_.shared[phase]; }

  // Whether there are so many parts that KV, which most narrow items read for the only time, should make place for them in
  // the L2 cache until they are merged. Deep trees gain 2 to 8 %; where there are few parts 5 % would be lost
  // (benchmarks/NOTES.md).
  __device__ bool parts_stay() const { return window_.parts_stay; }

  __device__ const Item& get(Phase phase, int i) const { return window_.items[window_.order[phase][i]]; }

 private:
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
