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
  int query;  // batch position of the first
  int m;      // tile
  int head;   // KV head
};

using ItemWindow = Item[kWarpSize];

class Items {
 public:
  // `windows` has one for each warp.
  __device__ Items(const Params& p, ItemWindow* windows) : p_(p), window_(windows[threadIdx.x / kWarpSize]) {
    for (int task = blockIdx.x; task < num_tasks(); task += gridDim.x) total_ += items_of(task);
    look_up();
  }

  // To the first item again.
  __device__ void restart() {
    if (base_ != 0) {
      base_ = 0;
      look_up();
    }
  }

  // To the next 32; false where there are none.
  __device__ bool next() {
    base_ += kWarpSize;
    if (base_ >= total_) return false;
    look_up();
    return true;
  }

  // Of the current 32, those with a tile in `ms`, as bits.
  __device__ uint32_t with_tiles(int ms) const {
    return __ballot_sync(~0u, (window_[fresh(threadIdx.x) % kWarpSize].m & ms) != 0);
  }

  // One of the current 32.
  __device__ const Item& operator[](int i) const { return window_[i]; }

 private:
  __device__ const int32_t* section(Header name) const { return p_.plan + p_.plan[name]; }
  __device__ int num_tasks() const { return p_.plan[kNumBins] * p_.kv_heads; }
  __device__ int items_of(int task) const {
    const int32_t* bin = section(kBins) + task / p_.kv_heads;
    return bin[1] - bin[0];
  }

  __device__ void look_up() {
    __syncwarp();
    const int lane = fresh(threadIdx.x) % kWarpSize, index = base_ + lane;
    Item item = {};
    if (index < total_) {
      int task = blockIdx.x, rest = index;
      for (; rest >= items_of(task); task += gridDim.x) rest -= items_of(task);
      const int32_t* row = section(kItems) + (section(kBins)[task / p_.kv_heads] + rest) * kItemSize;
      item.query = section(kQueries)[row[kFirstQuery]];
      const int end = row[kEnd] == kOpen ? int(p_.seq_lens[item.query]) : row[kEnd];
      item.slots = p_.rows[item.query] * p_.table_row + row[kStart];
      item.tokens = max(0, end - row[kStart]);
      item.first = row[kFirstQuery];
      item.count = row[kItemQueries];
      item.m = row[kTileN] == kTokens ? row[kTileM] : 0;
      item.head = task % p_.kv_heads;
    }
    window_[lane] = item;
    __syncwarp();
  }

  const Params& p_;
  Item* const window_;
  int base_ = 0, total_ = 0;
};

}  // namespace pat
