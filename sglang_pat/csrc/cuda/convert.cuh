// The producer for KV of 8 bits: copies bytes to shared memory, and converts them to 16 bits on their way into the ring. Each thread
// converts what it copied itself. The warps that compute see a ring like any other.
#pragma once

#include "ring.cuh"

namespace pat {

// Each thread copies and converts rows of its own: nobody else waits for its bytes. Its copies go on across the ends of items, but
// where Q has to be converted too, which waits for all of them.
template <typename T, typename Kv, int kDim, int kVDim, int kStages, int kAhead>
class ConvertingProducer : TileRows<kDim, kDim> {
  using Rows = TileRows<kDim, kDim>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::own_row, Rows::thread;
  using Memory = WideMemory<kDim, kStages, kAhead>;
  using Barriers = WideBarriers<kStages, Memory::kBuffers>;

  // A tile of an item, and of the item what is needed for each tile: looking it up once more takes longer than converting.
  struct Cursor {
    int item = -1, begin = 0, tokens = 0, head = 0;
    const int32_t* slots = nullptr;
  };

 public:
  __device__ ConvertingProducer(const Params& p, const Items<threads(kDim)>& items, Memory& memory, Barriers& barriers)
      : p_(p),
        items_(items),
        memory_(memory),
        cursor_(barriers.ring),
        queries_(p, items, memory.queries, barriers.queries) {}

  // The items of one look-up.
  __device__ void run() {
    if (items_.count(kWide) == 0) return;
    queries_.read(0);
#pragma unroll 1
    for (int i = 0; i < slot_lead(kAhead); ++i) ask_slots();
    commit_copies();
    wait_copies<0>();
    asking_ = advance(asked_);
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) ask();
#pragma unroll 1
    for (int i = 0; i < items_.count(kWide); ++i) {
      const Item& item = items_.get(kWide, i);
      queries_.copy();
      queries_.read(i + 1);
#pragma unroll 1
      for (int halves = int(unsigned(item.tokens + kTokens - 1) / kTokens) * 2; halves > 0; --halves)
        deliver(halves % 2 != 0), ask();
    }
  }

 private:
  __device__ static int first_row() { return int(thread() / kRowThreads); }
  __device__ static int column() { return int(thread() % kRowThreads); }
  // Whether this thread's column is one of K, or of V.
  __device__ static bool in_row(bool is_v) { return column() < (is_v ? kVDim : kDim) / kCopyBytes; }

  // To the next tile that there is: an item without tokens has none. False behind the last.
  __device__ bool advance(Cursor& cursor) const {
    cursor.begin += kTokens;
    while (cursor.begin >= cursor.tokens) {
      if (++cursor.item >= items_.count(kWide)) return false;
      const Item& item = items_.get(kWide, cursor.item);
      cursor = {cursor.item, 0, item.tokens, item.head, p_.req_to_token + item.slots};
    }
    return true;
  }

  // Where the slots of this thread's rows are, or of the rows from `row` on.
  __device__ int* slots(int tile, int row) const { return memory_.slots[tile] + row * kRows; }
  __device__ static int next_slots(int tile) { return tile == Memory::kSlotTiles - 1 ? 0 : tile + 1; }

  // Asks for the slots of the next tile whose slots have not been asked for: each warp for those of its own rows.
  __device__ void ask_slots() {
    if (advance(read_) && column() < kRows) {
      const int row = read_.begin + own_row();
      copy4_or_zero(shared_address(slots(read_slots_, first_row()) + column()), read_.slots + row, row < read_.tokens);
    }
    read_slots_ = next_slots(read_slots_);
  }

  // Of the oldest tile that was asked for, or of the next: this thread's `number`-th row.
  __device__ uint8_t* bytes(int number) const {
    return memory_.ring + kStages * kStageBytes<kDim> + at_ * kAheadBytes<kDim> + (first_row() + number * kStride) * kDim +
           column() * kCopyBytes;
  }

  // Issues the copies of a tile's K, next time of its V: always one commit group, empty after the last tile. The slots of a later tile are
  // copied along with K: when they were loaded into registers, ptxas made the load wait at once.
  __device__ void ask() {
    if (asking_) {
      if (!is_v_) {
        __syncwarp();  // what other lanes have asked for has come, and they have read what is overwritten
        ask_slots();
      }
      const uint32_t stride = is_v_ ? p_.v_slot : p_.k_slot;
      const char* from = static_cast<const char*>(is_v_ ? p_.v : p_.k) + asked_.head * (is_v_ ? p_.v_head : p_.k_head);
      from += column() * kCopyBytes;
      const int* const rows = slots(asked_slots_, first_row());
      const int tokens = asked_.tokens - asked_.begin - first_row();  // that are left from this thread's first row on
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Zeros behind the end: what lies there may be NaN.
        if (in_row(is_v_))
          copy16_or_zero(shared_address(bytes(i)), from + uint64_t(uint32_t(rows[i])) * stride, i * kStride < tokens);
      }
      if (is_v_) {
        asking_ = advance(asked_);
        asked_slots_ = next_slots(asked_slots_);
      }
      is_v_ = !is_v_;
    }
    commit_copies();
    at_ = at_ == kAhead - 1 ? 0 : at_ + 1;
  }

  // Converts the oldest copied tile of K or V into the ring's next stage.
  __device__ void deliver(bool is_v) {
    wait_copies<kAhead - 1>();
    uint4 loaded[kRows];
    if (in_row(is_v)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) loaded[i] = *reinterpret_cast<const uint4*>(bytes(i));
    }
    cursor_.wait_empty();
    if (in_row(is_v)) {
      uint8_t* const stage = memory_.ring + cursor_.stage() * kStageBytes<kDim>;
      // Of the two places of 16 bytes that its 16 numbers take, a thread begins with the second where the panel is an odd one: eight
      // threads that store together would otherwise use half of the banks.
      const bool odd = column() / (kPanelColumns / kCopyBytes) % 2 != 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint4 bytes = loaded[i];
        uint4 first, second;
        Kv::in_order(odd ? bytes.z : bytes.x, first.x, first.y), Kv::in_order(odd ? bytes.w : bytes.y, first.z, first.w);
        Kv::in_order(odd ? bytes.x : bytes.z, second.x, second.y),
            Kv::in_order(odd ? bytes.y : bytes.w, second.z, second.w);
        const int row = first_row() + i * kStride;
        *reinterpret_cast<uint4*>(stage + panel_offset(row, 2 * column() + odd, kTokens * kPanelRow)) = first;
        *reinterpret_cast<uint4*>(stage + panel_offset(row, 2 * column() + !odd, kTokens * kPanelRow)) = second;
      }
    }
    arrive(cursor_.full_barrier());
    cursor_.advance();
  }

  const Params& p_;
  const Items<threads(kDim)>& items_;
  Memory& memory_;
  RingCursor<kStages> cursor_;
  QueryProducer<T, typename Kv::Product, kDim, Memory::kBuffers> queries_;
  Cursor asked_, read_;
  int at_ = 0, asked_slots_ = 0, read_slots_ = 0;
  bool asking_ = false, is_v_ = false;
};

}  // namespace pat
