// The work items of a worker, one after the other. Each warp looks up 32 at a time, one by each lane, and keeps them in
// shared memory: so many loads that depend on each other are then waited for only once.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace pat {

// A work item of one KV head.
struct Item {
  int64_t slots;  // where its first KV slot is in req_to_token
  int tokens;
  int first;  // of the plan's queries and slots
  int count;  // queries
  int query;   // batch position of the first
  int target;  // where its part goes
  int16_t m;   // tile
  int16_t head;
};

// The items that a warp has looked up.
struct ItemWindow {
  Item items[kWarpSize];
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

  // To the next 32; false where there are none.
  __device__ bool next() {
    const int first = window_.first + kWarpSize, total = window_.total;
    if (first >= total) return false;
    look_up(first, total);
    return true;
  }

  // Of the current 32, those with a tile in `ms`, as bits.
  __device__ uint32_t with_tiles(int ms) const {
    return __ballot_sync(~0u, (window_.items[fresh(threadIdx.x) % kWarpSize].m & ms) != 0);
  }

  // Of all tiles.
  __device__ int total() const { return window_.total; }

  // One of the current 32.
  __device__ const Item& operator[](int i) const { return window_.items[i]; }

 private:
  __device__ const int32_t* section(Header name) const { return p_.plan + p_.plan[name]; }
  __device__ int num_tasks() const { return p_.plan[kNumBins] * p_.kv_heads; }
  __device__ int items_of(int task) const {
    const int32_t* bin = section(kBins) + task / p_.kv_heads;
    return bin[1] - bin[0];
  }

  __device__ void look_up(int first, int total) {
    __syncwarp();
    const int lane = fresh(threadIdx.x) % kWarpSize, index = first + lane;
    Item item = {};
    if (index < total) {
      int task = blockIdx.x, rest = index;
      for (; rest >= items_of(task); task += gridDim.x) rest -= items_of(task);
      const int32_t* row = section(kItems) + (section(kBins)[task / p_.kv_heads] + rest) * kItemSize;
      item.query = section(kQueries)[row[kFirstQuery]];
      const int end = row[kEnd] == kOpen ? int(p_.seq_lens[item.query]) : row[kEnd];
      item.slots = p_.rows[item.query] * p_.table_row + row[kStart];
      item.tokens = max(0, end - row[kStart]);
      item.first = row[kFirstQuery];
      item.count = row[kItemQueries];
      item.m = int16_t(row[kTileN] == kTokens ? row[kTileM] : 0);
      item.target = section(kSlots)[row[kFirstQuery]];
      item.head = int16_t(task % p_.kv_heads);
    }
    window_.items[lane] = item;
    window_.first = first, window_.total = total;
    __syncwarp();
  }

  const Params& p_;
  ItemWindow& window_;
};

}  // namespace pat
