// The work items of a worker, one after the other. Each warp looks up 64 at a time, two by each lane, and keeps them in
// shared memory: so many loads that depend on each other are then waited for only once.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace pat {

// A work item of one KV head.
struct Item {
  int64_t slots;  // where its first KV slot is in req_to_token
  int tokens;
  int first;   // of the plan's queries and slots
  int count;   // queries
  int query;   // batch position of the first
  int target;  // where its part goes
  int16_t m;   // tile
  int16_t head;
};

// Batch position of an item's `member`-th query; the first one was looked up with the item.
__device__ __forceinline__ int query_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.query : p.section(kQueries)[item.first + member];
}

// Q of the tile's row `row`, which is of the query `query`.
template <typename T>
__device__ __forceinline__ const T* q_row(const Params& p, const Item& item, int query, int row) {
  const int64_t head = item.head * p.group + p.head_of(row);
  return static_cast<const T*>(p.q) + query * p.q_row + head * p.q_head;
}

constexpr int kWindow = 2 * kWarpSize;

// The items that a warp has looked up.
struct ItemWindow {
  Item items[kWindow];
  int first, total;  // of the worker's items: the first one here, and how many there are
};

class Items {
 public:
  // `windows` has one for each warp.
  __device__ Items(const Params& p, ItemWindow* windows) : p_(p), window_(windows[threadIdx.x / kWarpSize]) {
    int total = 0;
    for (int task = blockIdx.x; task < num_tasks(); task += gridDim.x) total += items_of(task);
    look_up(0, total);
  }

  // To the first item again.
  __device__ void restart() {
    if (window_.first != 0) look_up(0, window_.total);
  }

  // To the next 64; false where there are none.
  __device__ bool next() {
    const int first = window_.first + kWindow, total = window_.total;
    if (first >= total) return false;
    look_up(first, total);
    return true;
  }

  // Of the current 64, those with a tile in `ms`, as bits.
  __device__ uint64_t with_tiles(int ms) const {
    const int lane = fresh(threadIdx.x) % kWarpSize;
    const uint32_t low = __ballot_sync(~0u, (window_.items[lane].m & ms) != 0);
    const uint32_t high = __ballot_sync(~0u, (window_.items[lane + kWarpSize].m & ms) != 0);
    return uint64_t(high) << kWarpSize | low;
  }

  // Of all tiles.
  __device__ int total() const { return window_.total; }

  // One of the current 64.
  __device__ const Item& operator[](int i) const { return window_.items[i]; }

 private:
  __device__ int num_tasks() const { return p_.plan[kNumBins] * p_.kv_heads; }
  __device__ int items_of(int task) const {
    const int32_t* bin = p_.section(kBins) + task / p_.kv_heads;
    return bin[1] - bin[0];
  }

  __device__ void look_up(int first, int total) {
    __syncwarp();
    const int lane = fresh(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int i = 0; i < kWindow; i += kWarpSize) window_.items[i + lane] = read(first + i + lane, total);
    window_.first = first, window_.total = total;
    __syncwarp();
  }

  // The worker's item `index`; one that is for no tile behind the last.
  __device__ __forceinline__ Item read(int index, int total) const {
    Item item = {};
    if (index >= total) return item;
    int task = blockIdx.x, rest = index;
    for (; rest >= items_of(task); task += gridDim.x) rest -= items_of(task);
    const int32_t* row = p_.section(kItems) + (p_.section(kBins)[task / p_.kv_heads] + rest) * kItemSize;
    item.query = p_.section(kQueries)[row[kFirstQuery]];
    item.target = p_.section(kSlots)[row[kFirstQuery]];
    const int end = row[kEnd] == kOpen ? int(p_.seq_lens[item.query]) : row[kEnd];
    item.slots = p_.rows[item.query] * p_.table_row + row[kStart];
    item.tokens = max(0, end - row[kStart]);
    item.first = row[kFirstQuery];
    item.count = row[kItemQueries];
    item.m = int16_t(row[kTileN] == kTokens ? row[kTileM] : 0);
    item.head = int16_t(task % p_.kv_heads);
    return item;
  }

  const Params& p_;
  ItemWindow& window_;
};

}  // namespace pat
