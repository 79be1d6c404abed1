// Fills the ring of wide items where KV has 8 bits: what the matrix products take has 16. Bytes wait in shared memory for the
// thread that asked for them, which converts them into a stage of the ring. So the warps that compute need not know.
#pragma once

#include "ring.cuh"

namespace pat {

// Each thread copies and converts rows of its own: nobody else waits for its bytes. Its copies go on across the ends of items, but
// where Q has to be converted too, which waits for all of them.
template <typename T, typename Kv, int kDim, int kStages, int kAhead>
class ConvertingProducer : TileRows<kDim, kDim> {
  using Rows = TileRows<kDim, kDim>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::own_row, Rows::thread;
  static constexpr int kRowCopies = kDim / kCopyBytes;

  // A tile of an item.
  struct Cursor {
    int item = 0, begin = 0;
  };

 public:
  __device__ ConvertingProducer(const Params& p, const Items<threads(kDim)>& items,
                                WideMemory<kDim, kStages, kAhead>& memory, WideBarriers<kStages>& barriers)
      : p_(p),
        items_(items),
        memory_(memory),
        cursor_(barriers.ring),
        queries_(p, items, memory.queries, barriers.queries) {}

  // The items of one look-up.
  __device__ void run() {
    if (items_.count(kWide) == 0) return;
    queries_.read(0);
    asked_ = read_ = tile_from(Cursor());
    read_slot();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) ask();
#pragma unroll 1
    for (int i = 0; i < items_.count(kWide); ++i) {
      const Item& item = items_.get(kWide, i);
      queries_.copy(item);
      queries_.read(i + 1);
#pragma unroll 1
      for (int halves = int(unsigned(item.tokens + kTokens - 1) / kTokens) * 2; halves > 0; --halves) deliver(), ask();
    }
  }

 private:
  __device__ static int first_row() { return int(thread() / kRowThreads); }
  __device__ static int column() { return int(thread() % kRowThreads); }

  __device__ bool ended(const Cursor& cursor) const { return cursor.item >= items_.count(kWide); }
  // The first tile that there is from here on: an item without tokens has none.
  __device__ Cursor tile_from(Cursor cursor) const {
    while (!ended(cursor) && cursor.begin >= items_.get(kWide, cursor.item).tokens) cursor = {cursor.item + 1, 0};
    return cursor;
  }
  __device__ Cursor after(const Cursor& cursor) const { return tile_from({cursor.item, cursor.begin + kTokens}); }

  // Reads the slot of the row that is this lane's, of the tile that will be asked for next.
  __device__ void read_slot() {
    if (ended(read_)) return;
    const Item& item = items_.get(kWide, read_.item);
    const int row = read_.begin + own_row();
    slot_ahead_ = row < item.tokens ? p_.req_to_token[item.slots + row] : 0;
    read_ = after(read_);
  }

  // Of the oldest tile that was asked for, or of the next: this thread's `number`-th row.
  __device__ uint8_t* bytes(int number) const {
    return memory_.ring + kStages * kStageBytes<kDim> + at_ * kAheadBytes<kDim> + (first_row() + number * kStride) * kDim +
           column() * kCopyBytes;
  }

  // Asks for K or V, by turns, of the next tile: a commit group, also where there is nothing left.
  __device__ void ask() {
    if (!ended(asked_)) {
      const Item& item = items_.get(kWide, asked_.item);
      if (!is_v_) slot_ = slot_ahead_, read_slot();
      const uint32_t stride = is_v_ ? p_.v_slot : p_.k_slot;
      const char* from = static_cast<const char*>(is_v_ ? p_.v : p_.k) + item.head * (is_v_ ? p_.v_head : p_.k_head);
      from += column() * kCopyBytes;
      const int lane = Rows::slot_lane();
      const int tokens = item.tokens - asked_.begin - first_row();  // that are left from this thread's first row on
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t slot = __shfl_sync(~0u, slot_, lane + i);
        // Zeros behind the end: what lies there may be NaN.
        if (column() < kRowCopies)
          copy16_or_zero(shared_address(bytes(i)), from + uint64_t(slot) * stride, i * kStride < tokens);
      }
      if (is_v_) asked_ = after(asked_);
      is_v_ = !is_v_;
    }
    commit_copies();
    at_ = at_ == kAhead - 1 ? 0 : at_ + 1;
  }

  // Converts what was asked for first into the next stage of the ring.
  __device__ void deliver() {
    wait_copies<kAhead - 1>();
    uint4 loaded[kRows];
    if (column() < kRowCopies) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) loaded[i] = *reinterpret_cast<const uint4*>(bytes(i));
    }
    cursor_.wait_empty();
    if (column() < kRowCopies) {
      uint8_t* const stage = memory_.ring + cursor_.stage() * kStageBytes<kDim>;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint4 low, high;
        Kv::in_order(loaded[i].x, low.x, low.y), Kv::in_order(loaded[i].y, low.z, low.w);
        Kv::in_order(loaded[i].z, high.x, high.y), Kv::in_order(loaded[i].w, high.z, high.w);
        const int row = first_row() + i * kStride;
        *reinterpret_cast<uint4*>(stage + panel_offset(row, 2 * column(), kTokens * kPanelRow)) = low;
        *reinterpret_cast<uint4*>(stage + panel_offset(row, 2 * column() + 1, kTokens * kPanelRow)) = high;
      }
    }
    fence_async_proxy();
    arrive(cursor_.full_barrier());
    cursor_.advance();
  }

  const Params& p_;
  const Items<threads(kDim)>& items_;
  WideMemory<kDim, kStages, kAhead>& memory_;
  RingCursor<kStages> cursor_;
  QueryProducer<T, typename Kv::Product, kDim> queries_;
  Cursor asked_, read_;
  int at_ = 0, slot_ = 0, slot_ahead_ = 0;
  bool is_v_ = false;
};

}  // namespace pat
