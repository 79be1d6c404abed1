// Producers of wide items for 8-bit KV where `converts_directly`: bytes go from the pools to registers, become 16 bits and
// are stored into the ring's stages (ring.cuh). Consumers see the same ring as with 16-bit KV. Shared memory has no room
// for bytes that wait, and each of them would pass through it twice more. plain.cuh runs it.
//
// A stage is filled by one of four sets of threads: two convert K of every second KV tile, two V. While one converts, the
// others' bytes come. Each asks for bytes only when it has converted those before: ptxas (CUDA 13.0) gives all loads that
// are in flight at a branch one scoreboard, so a warp with several tiles on their way would wait for the last one.
#pragma once

#include "plain_copy.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kVDim, int kStages>
class DirectProducer {
  using Memory = WideMemory<kDim, kStages, 0>;
  static constexpr int kThreads = stage_threads(kDim), kSets = kDirectSets, kApart = kSets / 2;
  // A thread has some rows of a tile, and of each 16 bytes of every panel. Its rows have the same swizzle.
  static constexpr int kRowThreads = kPanelColumns / kCopyBytes, kStride = kThreads / kRowThreads;
  static constexpr int kRows = kTokens / kStride;
  static constexpr int kChunks = kDim / kPanelColumns, kVChunks = kVDim / kPanelColumns;
  // Tiles from one whose slots are loaded to one whose slots are prefetched. As L2 may read 64 bytes for a prefetch and not a
  // line (CUDA C++ API, `cudaLimitMaxL2FetchGranularity`), each is of so many.
  static constexpr int kSlotsAhead = 2 * kApart, kSlotsAtATime = 64 / int(sizeof(int32_t));
  static_assert(kStride % 8 == 0 && kDim % kPanelColumns == 0 && kVDim % kPanelColumns == 0);
  static_assert(!converts_directly(kDim) || !Variant::kTails);

  // Of a KV tile, for this thread: the slots of its rows, the KV head, and the tokens of the item from the tile on; none
  // behind the last tile.
  struct Slots {
    int of[kRows] = {};
    int head = 0, left = 0;
  };
  // Where its bytes of these rows begin.
  struct Rows {
    const char* of[kRows];
    int left;
  };

 public:
  template <typename CtaMemory>
  __device__ DirectProducer(const Params& p, const Items<threads(kDim)>& items, CtaMemory& memory)
      : p_(p),
        items_(items),
        memory_(memory.wide),
        ring_(memory.barriers.ring),
        queries_(p, items, memory.wide.queries, memory.barriers.queries),
        is_v_(set() % 2 != 0),
        begin_((set() / 2 - kApart) * kTokens) {
    ring_.advance(set());
    // Of two neighbouring chunks of 16 bytes in a stage; the swizzle changes the lowest bit of their number.
    place_ = fresh(panel_offset(first_row(), 2 * column(), kPanelBytes));
  }

  // All items of one look-up. While a tile is converted, the next one of this set is on its way to L2, and the slots of the
  // one after. Q of an item is asked for behind the last tile of the item before, and converted behind the first tile of
  // its own: meanwhile it comes.
  __device__ void run() {
    const int count = items_.count(kWide);
    if (count == 0) return;
    queries_.read(0);
    const Slots first = next_slots(), second = next_slots();
    Slots slots = next_slots();
    Rows next = find(second);
    int left = first.left, tile = set() / 2;
    load(find(first));
    start_queries(0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Item& item = items_.get(kWide, i);
      const int tiles = tiles_of(item.tokens);
      bool finished = false;
#pragma unroll 1
      for (; tile < tiles; tile += kApart) {
        const Rows behind = find(slots);
        prefetch_rows(behind);
        fill(left);
        load(next);
        slots = next_slots();
        left = next.left, next = behind;
        if (!finished) queries_.finish(item), finished = true;
      }
      tile -= tiles;
      if (!finished) queries_.finish(item);
      if (i + 1 < count) start_queries(i + 1);
    }
  }

 private:
  __device__ static int thread() { return thread_of<kThreads>(); }
  __device__ static int set() { return thread_of<producer_threads(kDim)>() / kThreads; }
  __device__ static int column() { return thread() % kRowThreads; }
  __device__ static int first_row() { return thread() / kRowThreads; }

  __device__ void start_queries(int i) {
    queries_.start(items_.get(kWide, i));
    queries_.read(i + 1);
  }

  // Moves on to this set's next KV tile, whose slots are then on their way. A set's tiles are kApart apart, also across
  // items.
  __device__ Slots next_slots() {
    begin_ += kApart * kTokens;
    while (begin_ >= tiles_of(tokens_) * kTokens) {
      if (item_ + 1 >= items_.count(kWide)) return {};
      begin_ -= tiles_of(tokens_) * kTokens;
      const Item& item = items_.get(kWide, ++item_);
      tokens_ = item.tokens, head_ = item.kv.head, slots_ = p_.req_to_token + item.slots;
    }
    const int further = begin_ + kSlotsAhead * kTokens + thread() * kSlotsAtATime;
    if (thread() < kTokens / kSlotsAtATime && further < tokens_) prefetch(slots_ + further);
    Slots found = {{}, head_, tokens_ - begin_};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = begin_ + first_row() + i * kStride;
      found.of[i] = row < tokens_ ? slots_[seen_row(items_.get(kWide, item_), row)] : 0;
    }
    return found;
  }

  // Of some token where the tile has no such row.
  __device__ Rows find(const Slots& slots) const {
    const char* const pool = static_cast<const char*>(is_v_ ? p_.v : p_.k) + slots.head * (is_v_ ? p_.v_head : p_.k_head);
    const uint32_t stride = is_v_ ? p_.v_slot : p_.k_slot;
    Rows rows;
    rows.left = slots.left;
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows.of[i] = pool + column() * kCopyBytes + uint64_t(uint32_t(slots.of[i])) * stride;
    return rows;
  }

  // Whether K or V of this set has a panel.
  __device__ bool has(int panel) const { return kVChunks == kChunks || panel < kVChunks || !is_v_; }

  // To L2: each thread as many bytes of a row as a panel has columns.
  __device__ void prefetch_rows(const Rows& rows) const {
    if (column() >= kChunks || !has(column())) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_row() + i * kStride < rows.left) prefetch(rows.of[i] + column() * (kPanelColumns - kCopyBytes));
    }
  }

  __device__ void load(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int panel = 0; panel < kChunks; ++panel) {
        if (has(panel)) bytes_[i][panel] = *reinterpret_cast<const uint4*>(rows.of[i] + panel * kPanelColumns);
      }
    }
  }

  // Makes zero what is behind the `left` tokens that are left: weights of V are zero there, but memory may hold NaN.
  __device__ void clear_rows(int left) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_row() + i * kStride < left) continue;
      const uint32_t zero = fresh(0u);  // a branch, and not a selection for each register of every tile
#pragma unroll
      for (int panel = 0; panel < kChunks; ++panel) bytes_[i][panel] = make_uint4(zero, zero, zero, zero);
    }
  }

  // Converts what was loaded, of a tile of which `left` tokens are left, into the set's next stage.
  __device__ void fill(int left) {
    ring_.wait_empty();
    uint8_t* const stage = memory_.ring + ring_.stage() * kStageBytes<kDim>;
    uint8_t *const low = stage + place_, *const high = stage + (place_ ^ kCopyBytes);
    if (left < kTokens) clear_rows(left);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int panel = 0; panel < kChunks; ++panel) {
        if (!has(panel)) continue;
        const uint4 own = bytes_[i][panel];
        const int at = panel * kPanelBytes + i * kStride * kPanelRow;
        *reinterpret_cast<uint4*>(low + at) = Kv::adjacent(own.x, own.y);
        *reinterpret_cast<uint4*>(high + at) = Kv::adjacent(own.z, own.w);
      }
    }
    arrive(ring_.full_barrier());
    ring_.advance(kSets);
  }

  const Params& p_;
  const Items<threads(kDim)>& items_;
  Memory& memory_;
  RingCursor<kStages> ring_;
  QueryProducer<T, typename Kv::Product, kDim, Memory::kBuffers> queries_;
  const bool is_v_;
  // The tile whose slots were loaded last: its item, where it begins there, and what its slots need of the item.
  int item_ = -1, begin_, tokens_ = 0, head_ = 0;
  const int32_t* slots_ = nullptr;
  uint32_t place_;
  uint4 bytes_[kRows][kChunks];
};

}  // namespace pat
