// What a worker reads: its work items one after the other, cut into tiles, and the K and V rows of each tile, copied
// into shared memory ahead of their use and across the ends of items.
//
// A tile takes four steps on its way, each a barrier or more after the one before, so that no load waits for another:
// its work item is looked up (a window of 32 at a time), its KV slots are copied, then its K rows, then its V rows.
// One warp does the first two and keeps their state in shared memory: wide tiles need all the registers there are.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace pat {

// A work item of one KV head.
struct Entry {
  int64_t slots;  // where its first KV slot is in req_to_token
  int tokens;
  int first;      // of the plan's queries and slots
  int16_t count;  // queries
  int16_t m;      // tile; 0 for an item that is not this kernel's
  int head;       // KV head
};

// A tile on its way.
struct Stage {
  int tokens;  // -1 behind the last item
  int head;
  int rows;     // of Q, to be copied with K: only in the first tile of a 16-row item
  int ordinal;  // of its item among this worker's
};

constexpr int kWindow = 32;              // items looked up together, one by each lane
constexpr int kStages = 4;               // tiles looked up and not yet done, and so items
constexpr int kNarrowM = 16;             // items of this tile have their Q copied ahead
constexpr int kStagingWarp = kWarps - 1;  // has the least to do in tiles with few tokens

template <int kTokens>
struct FeedMemory {
  Entry window[kWindow];
  Entry items[kStages];
  int queries[kStages][kNarrowM], targets[kStages][kNarrowM];  // of 16-row items
  Stage stages[kStages];
  int slots[kStages][kTokens];
  struct {
    int total;          // items of this worker, other kernels' too
    int looked_up;      // of them
    int item, ordinal;  // the next tile's item, in that sequence and among this kernel's
    int done;           // its tokens that are staged
  } state;
};

template <typename T, int kDim, int kTokens, typename Tiles>
class Feed {
  using S = Sizes<kDim, kTokens, Tiles::kMaxM>;
  static constexpr int kChunks = kDim / 8;  // 16-byte chunks of a row

 public:
  using Memory = FeedMemory<kTokens>;

  __device__ Feed(const Params& params, Memory& memory, uint32_t ring, uint32_t narrow_q)
      : p_(params), memory_(memory), ring_(ring), narrow_q_(narrow_q) {}

  __device__ void begin_item(int thread) { thread_ = thread; }

  // Fills the pipeline: K and V of the first tile, K of the second.
  __device__ void begin() {
    if (thread_ / 32 == kStagingWarp) {
      int total = 0;
      for (int task = blockIdx.x; task < num_tasks(); task += gridDim.x) total += items_of(task);
      if (lane() == 0) memory_.state = {total, 0, 0, 0, 0};
      __syncwarp();
      skip_others();
      stage(0);
      stage(1);
      wait_copies<0>();
    }
    __syncthreads();
    load_k(0);
    load_v(0);
    load_k(1);
  }

  // K of the first tile is in shared memory, the next time its V, then K of the second tile and so on.
  __device__ void wait() {
    wait_copies<2>();
    fence_async_proxy();
    __syncthreads();
  }

  // Tokens of this worker's tile; -1 behind the last.
  __device__ int tokens(int tile) const { return memory_.stages[tile % kStages].tokens; }
  // The item that is the worker's `ordinal`-th, its queries' batch positions, and where their parts go.
  __device__ const Entry& item(int ordinal) const { return memory_.items[ordinal % kStages]; }
  __device__ const int* queries(int ordinal) const {
    const Entry& e = item(ordinal);
    return e.m == kNarrowM ? memory_.queries[ordinal % kStages] : section(kQueries) + e.first;
  }
  __device__ const int* targets(int ordinal) const {
    const Entry& e = item(ordinal);
    return e.m == kNarrowM ? memory_.targets[ordinal % kStages] : section(kSlots) + e.first;
  }

  __device__ uint32_t unit(int tile, bool is_v) const { return ring_ + ((tile & 1) * 2 + is_v) * S::kUnit; }
  __device__ uint32_t narrow_q(int ordinal) const { return narrow_q_ + (ordinal & 1) * S::kNarrowQ; }

  __device__ void load_k(int tile) {
    const Stage stage = memory_.stages[tile % kStages];
    if (stage.tokens >= 0) {
      copy_rows<false>(tile, stage);
      if (stage.rows > 0) copy_narrow_q(stage);
    }
    commit_copies();
  }

  // Also has the slots copied of the tile after the next.
  __device__ void load_v(int tile) {
    const Stage next = memory_.stages[tile % kStages];
    if (next.tokens >= 0) copy_rows<true>(tile, next);
    if (thread_ / 32 == kStagingWarp) stage(tile + 2);
    commit_copies();
  }

  // Q of a wide item, by the worker itself: the rows are many, and their place is free only now.
  __device__ void copy_wide_q(int ordinal, uint8_t* to) const {
    const Entry& e = item(ordinal);
    const int* queries = section(kQueries) + e.first;
    const int rows = e.count * p_.group, panel = e.m * kPanelRow;
#pragma unroll 8
    for (int i = thread_; i < e.m * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < rows) value = *reinterpret_cast<const uint4*>(q_row(queries[row / p_.group], e.head, row) + chunk * 8);
      *reinterpret_cast<uint4*>(to + panel_offset(row, chunk, panel)) = value;
    }
  }

 private:
  __device__ int lane() const { return thread_ % 32; }
  __device__ const int32_t* section(Header name) const { return p_.plan + p_.plan[name]; }
  __device__ int num_tasks() const { return p_.plan[kNumBins] * p_.kv_heads; }
  __device__ int items_of(int task) const {
    const int32_t* bin = section(kBins) + task / p_.kv_heads;
    return bin[1] - bin[0];
  }
  __device__ const T* q_row(int query, int kv_head, int row) const {
    return static_cast<const T*>(p_.q) + query * p_.q_row + (kv_head * p_.group + row % p_.group) * p_.q_head;
  }

  // Looks up the next kWindow items.
  __device__ void look_up() {
    __syncwarp();
    const int index = memory_.state.looked_up + lane();
    if (index < memory_.state.total) {
      int task = blockIdx.x, rest = index;
      for (; rest >= items_of(task); task += gridDim.x) rest -= items_of(task);
      // Half of the workers go backwards: an SM's two then do not both compute first and read later.
      const int32_t* bin = section(kBins) + task / p_.kv_heads;
      const int32_t* item = section(kItems) + (blockIdx.x / p_.sms % 2 ? bin[1] - 1 - rest : bin[0] + rest) * kItemSize;
      const int query = section(kQueries)[item[kFirstQuery]];
      const int stop = item[kEnd] == kOpen ? int(p_.seq_lens[query]) : item[kEnd];
      Entry& entry = memory_.window[lane()];
      entry.slots = p_.rows[query] * p_.table_row + item[kStart];
      entry.tokens = max(0, stop - item[kStart]);
      entry.first = item[kFirstQuery];
      entry.count = int16_t(item[kItemQueries]);
      entry.m = int16_t(item[kTileN] == kTokens && Tiles::has(item[kTileM]) ? item[kTileM] : 0);
      entry.head = task % p_.kv_heads;
    }
    __syncwarp();
    if (lane() == 0) memory_.state.looked_up += kWindow;
    __syncwarp();
  }

  // Moves on to the next item that is this kernel's.
  __device__ void skip_others() {
    int item = memory_.state.item;
    for (; item < memory_.state.total; ++item) {
      if (item == memory_.state.looked_up) look_up();
      if (memory_.window[item % kWindow].m != 0) break;
    }
    __syncwarp();
    if (lane() == 0) memory_.state.item = item;
    __syncwarp();
  }

  // Looks up the next tile, `tile`, and has its slots copied.
  __device__ void stage(int tile) {
    const auto state = memory_.state;
    Stage& to = memory_.stages[tile % kStages];
    if (state.item >= state.total) {
      to.tokens = -1;
      return;
    }
    const Entry e = memory_.window[state.item % kWindow];
    const bool first = state.done == 0, narrow = e.m == kNarrowM, last = state.done + kTokens >= e.tokens;
    const int tokens = min(kTokens, e.tokens - state.done), at = state.ordinal % kStages;
    __syncwarp();
    if (lane() == 0) {
      to = Stage{tokens, e.head, first && narrow ? e.count * p_.group : 0, state.ordinal};
      if (first) memory_.items[at] = e;
      memory_.state.done = last ? 0 : state.done + kTokens;
      memory_.state.ordinal = state.ordinal + last;
      memory_.state.item = state.item + last;
    }
    const int32_t* slots = p_.req_to_token + e.slots + state.done;
    for (int i = lane(); i < tokens; i += 32) copy4(shared_address(&memory_.slots[tile % kStages][i]), slots + i);
    if (first && narrow && lane() < e.count) {
      copy4(shared_address(&memory_.targets[at][lane()]), section(kSlots) + e.first + lane());
      copy4(shared_address(&memory_.queries[at][lane()]), section(kQueries) + e.first + lane());
    }
    __syncwarp();
    if (last) skip_others();
  }

  template <bool kIsV>
  __device__ void copy_rows(int tile, const Stage& stage) const {
    constexpr int kCopies = kTokens * kChunks / kThreads, kBatch = kCopies % 4 == 0 ? 4 : kCopies % 2 == 0 ? 2 : 3;
    const int* slots = memory_.slots[tile % kStages];
    const uint32_t to = unit(tile, kIsV);
    const T* pool = static_cast<const T*>(kIsV ? p_.v : p_.k) + stage.head * (kIsV ? p_.v_head : p_.k_head);
    const int64_t stride = kIsV ? p_.v_slot : p_.k_slot;
#pragma unroll
    for (int begin = 0; begin < kCopies; begin += kBatch) {
      int slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = (thread_ + (begin + i) * kThreads) / kChunks;
        slot[i] = row < stage.tokens ? slots[row] : -1;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = thread_ + (begin + i) * kThreads, row = at / kChunks, chunk = at % kChunks;
        // V must be zero behind the end, where its weight is: what lies there may be NaN. K's scores are masked.
        if (slot[i] >= 0 || kIsV)
          copy16(to + panel_offset(row, chunk, S::kPanel), pool + max(slot[i], 0) * stride + chunk * 8, slot[i] >= 0);
      }
    }
  }

  __device__ void copy_narrow_q(const Stage& stage) const {
    const int* queries = memory_.queries[stage.ordinal % kStages];
    const uint32_t to = narrow_q(stage.ordinal);
#pragma unroll
    for (int i = thread_; i < kNarrowM * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = row < stage.rows;
      copy16(to + panel_offset(row, chunk, kNarrowM * kPanelRow),
             q_row(valid ? queries[row / p_.group] : 0, stage.head, row) + chunk * 8, valid);
    }
  }

  const Params& p_;
  Memory& memory_;
  const uint32_t ring_, narrow_q_;
  int thread_ = threadIdx.x;
};

}  // namespace pat
