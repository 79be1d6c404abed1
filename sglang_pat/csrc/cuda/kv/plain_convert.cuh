// Producer of wide items for 8-bit KV: copies tiles of bytes [64 tokens, dim] to shared memory (`ahead`), converts them to
// 16 bits in registers, and stores them into the ring's stages (ring.cuh). Consumers see the same ring as with 16-bit KV.
// With `two_convert` the producer warpgroup converts K, and the last consumer warpgroup V and Q. plain.cuh runs it.
#pragma once

#include "plain_copy.cuh"

namespace pat {

enum class ProducerRole { kKAndV, kK, kV };  // Q is copied with V

// Each thread converts the bytes that it copied itself, so it waits for nobody else's. Copies run on across the ends of
// items, except where Q has to be converted, which waits for all of them.
template <typename T, typename Kv, int kDim, int kVDim, int kStages, int kAhead, ProducerRole kRole>
class ConvertingProducer : TileRows<kDim, kDim> {
  using Rows = TileRows<kDim, kDim>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::own_row, Rows::thread;
  using Memory = WideMemory<kDim, kStages, kAhead>;
  using Barriers = WideBarriers<kStages, Memory::kBuffers>;
  static constexpr bool kAll = kRole == ProducerRole::kKAndV, kWithQueries = kRole != ProducerRole::kK;
  static constexpr int kPlace =
      kRole == ProducerRole::kV;  // index in memory.ahead and memory.slots, and of a tile's stages
  static constexpr int kLead = slot_lead(kDim, kAhead), kSlotsOnly = -2;
  // With one buffer, Q of an item is copied when all warpgroups are done with the item before (`TileStages` relies on it).
  static_assert(kAll ? !two_convert(kDim) : two_convert(kDim) && Memory::kBuffers == 1);

  static constexpr int kSlotsAlign = std::min(kRows, 4) * int(sizeof(int));
  struct alignas(kSlotsAlign) SlotsOf {
    int of[kRows];
  };

  // A KV tile, and what it needs of its item: looking that up for each tile would take longer than the conversion.
  struct Cursor {
    int item = -1, begin = 0, tokens = 0, head = 0;
    int tail = -1;  // number among the item's tiles of tails, which go round its queries; -1 in the shared KV
    const int32_t* slots = nullptr;
  };

 public:
  __device__ ConvertingProducer(const Params& p, const Items<threads(kDim)>& items, Memory& memory, Barriers& barriers)
      : p_(p),
        items_(items),
        memory_(memory),
        cursor_(barriers.ring),
        queries_(p, items, memory.queries, barriers.queries) {
    if (kPlace == 1) cursor_.advance(), is_v_ = true;
    // A thread stores 16 values as two chunks of 16 bytes. It begins with the second chunk where the panel, or the 128-byte
    // line that the bytes come from, is odd: otherwise eight threads that store together, or sixteen that load, would use
    // half of the banks.
    const int row = int(thread() / kRowThreads);
    const int half = (column() / (kPanelColumns / kCopyBytes) + source(row) / kPanelRow) % 2;
    source_ = fresh(source(row) + half * kCopyBytes / 2);
    panel_ = fresh(panel_offset(row, 2 * column() + half, kPanelBytes));
  }

  // All items of one look-up. The first two iterations have no item: they issue the slots of the first tiles, then their
  // copies. One loop, so that its code is there once.
  __device__ void run() {
    const int items = items_.count(kWide);
    if (items == 0) return;
    if constexpr (kWithQueries) queries_.read(0);
#pragma unroll 1
    for (int i = kSlotsOnly; i < items; ++i) {
      int stages = i == kSlotsOnly ? kLead : kAhead;
      if (i >= 0) {
        const Item& item = items_.get(kWide, i);
        stages = (tiles_of(item.tokens) + all_tail_tiles(item)) * (kAll ? 2 : 1);
        if constexpr (kWithQueries) {
          queries_.copy();
          queries_.read(i + 1);
        }
      } else if (i > kSlotsOnly) {
        wait_copies<0>();
        issue_more_ = advance(issue_cursor_);
      }
#pragma unroll 1
      for (; stages > 0; --stages) {
        if (i >= 0) convert_stage(kAll ? stages % 2 != 0 : kRole == ProducerRole::kV);
        issue(i == kSlotsOnly);
      }
    }
  }

 private:
  __device__ static int first_row() { return int(thread() / kRowThreads); }
  __device__ static int column() { return int(thread() % kRowThreads); }
  // Whether K or V is as wide as this thread's column.
  __device__ static bool in_row(bool is_v) { return column() < (is_v ? kVDim : kDim) / kCopyBytes; }

  // KV tiles of all tails of an item: of each query as many as the longest tail has.
  template <typename AnyItem>
  __device__ static int all_tail_tiles(const AnyItem& item) {
    if constexpr (kLooksUpTails) return item.count * tiles_of(max(item.tail_tokens[0], item.tail_tokens[1]));
    return 0;
  }

  // Moves to the next KV tile; items without tokens have none. False behind the last.
  __device__ bool advance(Cursor& cursor) const {
    const int items = items_.count(kWide);
    cursor.begin += kTokens;
    while (cursor.tail >= 0 || cursor.begin >= cursor.tokens) {
      if constexpr (kLooksUpTails) {
        const bool in_item = cursor.item >= 0 && cursor.item < items;
        if (in_item && advance_in_tails(cursor, items_.get(kWide, cursor.item))) return true;
      }
      if (++cursor.item >= items) return false;
      const Item& item = items_.get(kWide, cursor.item);
      cursor = {cursor.item, 0, item.tokens, item.kv.head, -1, p_.req_to_token + item.slots};
    }
    return true;
  }

  // The same within the tails of an item. A tail that has ended has tiles without tokens.
  template <typename AnyItem>
  __device__ bool advance_in_tails(Cursor& cursor, const AnyItem& item) const {
    if (++cursor.tail >= all_tail_tiles(item)) return false;
    const bool second = cursor.tail % item.count != 0;
    cursor.begin = cursor.tail / item.count * kTokens;
    cursor.tokens = item.tail_tokens[second];
    cursor.slots = p_.req_to_token + (second ? item.second_tail : item.slots + item.tokens);
    return true;
  }

  // Slots of this thread's rows of a tile, or of the rows from `row` on.
  __device__ int* slots(int tile, int row) const { return memory_.slots[kPlace][tile] + row * kRows; }
  __device__ static int next_slots(int tile) { return tile == Memory::kSlotTiles - 1 ? 0 : tile + 1; }

  // Issues the copy of the next KV tile's slots; each warp copies those of its own rows.
  __device__ void issue_slots() {
    if (advance(read_) && column() < kRows) {
      const int row = seen_row(items_.get(kWide, read_.item), read_.begin + own_row());
      copy4_or_zero(shared_address(slots(read_slots_, first_row()) + column()), read_.slots + row, row < read_.tokens);
    }
    read_slots_ = next_slots(read_slots_);
  }

  // Offset of this thread's bytes in a tile of bytes.
  __device__ static int source(int row) { return row * kDim + column() * kCopyBytes; }
  // The place of the oldest tile in flight, which is also the next one's.
  __device__ uint8_t* ahead() const { return memory_.ahead[kPlace] + at_ * kAheadBytes<kDim>; }

  // Issues the copies of a tile's K, next time of its V (or always of the one that is this producer's). It commits one
  // group each time, also after the last tile. Slots of a later tile are copied along: when they were loaded to registers,
  // ptxas made the load wait at once.
  __device__ void issue(bool slots_only) {
    if ((issue_more_ | slots_only) && (!kAll || !is_v_)) {
      __syncwarp();  // what other lanes have asked for has come, and they have read what is overwritten
      issue_slots();
    }
    if (issue_more_) {
      const uint32_t stride = is_v_ ? p_.v_slot : p_.k_slot;
      const char* const from = fresh(static_cast<const char*>(is_v_ ? p_.v : p_.k) +
                                     issue_cursor_.head * (is_v_ ? p_.v_head : p_.k_head) + column() * kCopyBytes);
      const SlotsOf rows = *reinterpret_cast<const SlotsOf*>(slots(issue_slots_at_, first_row()));
      const uint32_t to = shared_address(ahead()) + (source_ & ~(kCopyBytes - 1));
      const int tokens = issue_cursor_.tokens - issue_cursor_.begin - first_row();  // left from this thread's first row on
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Zeros behind the end: memory may hold NaN.
        if (in_row(is_v_))
          copy16_or_zero(to + i * kStride * kDim, from + uint64_t(uint32_t(rows.of[i])) * stride, i * kStride < tokens);
      }
      if (!kAll || is_v_) {
        issue_more_ = advance(issue_cursor_);
        issue_slots_at_ = next_slots(issue_slots_at_);
      }
      if (kAll) is_v_ = !is_v_;
    }
    commit_copies();
    at_ = at_ == kAhead - 1 ? 0 : at_ + 1;
  }

  // Converts the oldest tile in flight into the next stage of the ring.
  __device__ void convert_stage(bool is_v) {
    wait_copies<kAhead - 1>();
    uint2 loaded[kRows][2] = {};
    if (in_row(is_v)) {
      const uint8_t *const first = ahead() + source_, *const second = ahead() + (source_ ^ kCopyBytes / 2);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        loaded[i][0] = *reinterpret_cast<const uint2*>(first + i * kStride * kDim);
        loaded[i][1] = *reinterpret_cast<const uint2*>(second + i * kStride * kDim);
      }
    }
    cursor_.wait_empty();
    if (in_row(is_v)) {
      uint8_t* const stage = memory_.ring + cursor_.stage() * kStageBytes<kDim>;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 bytes = loaded[i][half];
          *reinterpret_cast<uint4*>(stage + next_row(panel_ ^ half * kCopyBytes, i * kStride)) =
              Kv::adjacent(bytes.x, bytes.y);
        }
      }
    }
    arrive(cursor_.full_barrier());
    cursor_.advance(kAll ? 1 : 2);
  }

  const Params& p_;
  const Items<threads(kDim)>& items_;
  Memory& memory_;
  RingCursor<kStages> cursor_;
  QueryProducer<T, typename Kv::Product, kDim, Memory::kBuffers> queries_;
  Cursor issue_cursor_, read_;
  int at_ = 0, issue_slots_at_ = 0, read_slots_ = 0;
  uint32_t source_, panel_;  // offsets of this thread's first row in a tile of bytes, and in a stage
  bool issue_more_ = false, is_v_ = false;
};

}  // namespace pat
