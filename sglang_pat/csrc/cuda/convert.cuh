// The producer for KV of 8 bits: copies bytes to shared memory, and converts them to 16 bits on their way into the ring. Each thread
// converts what it copied itself. The warps that compute see a ring like any other. Where two groups of warps convert, one has K, the other V and Q.
#pragma once

#include "ring.cuh"

namespace pat {

enum class ProducerRole { kKAndV, kK, kV };  // Q comes with V

// Each thread copies and converts rows of its own: nobody else waits for its bytes. Its copies go on across the ends of items, but
// where Q has to be converted too, which waits for all of them.
template <typename T, typename Kv, int kDim, int kVDim, int kStages, int kAhead, ProducerRole kRole>
class ConvertingProducer : TileRows<kDim, kDim> {
  using Rows = TileRows<kDim, kDim>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::own_row, Rows::thread;
  using Memory = WideMemory<kDim, kStages, kAhead>;
  using Barriers = WideBarriers<kStages, Memory::kBuffers>;
  static constexpr bool kAll = kRole == ProducerRole::kKAndV, kWithQueries = kRole != ProducerRole::kK;
  static constexpr int kPlace = kRole == ProducerRole::kV;  // in memory and in a tile's stages
  static constexpr int kLead = slot_lead(kDim, kAhead), kSlotsOnly = -2;
  // Q of an item comes when all groups are done with the item before, so with its K (`TileStages`).
  static_assert(kAll ? !two_convert(kDim) : two_convert(kDim) && Memory::kBuffers == 1);

  static constexpr int kSlotsAlign = std::min(kRows, 4) * int(sizeof(int));
  struct alignas(kSlotsAlign) SlotsOf {
    int of[kRows];
  };

  // A tile of an item, and of the item what is needed for each tile: looking it up once more takes longer than converting.
  struct Cursor {
    int item = -1, begin = 0, tokens = 0, head = 0;
    int tail = -1;  // of the item's tiles of tails, which is one of each query in turn
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
    // Of the two places of 16 bytes that its 16 numbers take, a thread begins with the second where the panel is an odd one, or the line of 128
    // bytes that they come from: else eight threads that store together would use half of the banks, or sixteen that load.
    const int row = int(thread() / kRowThreads);
    const int half = (column() / (kPanelColumns / kCopyBytes) + source(row) / kPanelRow) % 2;
    source_ = fresh(source(row) + half * kCopyBytes / 2);
    panel_ = fresh(panel_offset(row, 2 * column() + half, kTokens * kPanelRow));
  }

  // The items of one look-up. In front of them the slots of some tiles are asked for, and then some tiles: one loop, so that its code is there once.
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
  // Whether this thread's column is one of K, or of V.
  __device__ static bool in_row(bool is_v) { return column() < (is_v ? kVDim : kDim) / kCopyBytes; }

  // Tiles of all of an item's tails together: of each query as many as the longest one has.
  template <typename AnyItem>
  __device__ static int all_tail_tiles(const AnyItem& item) {
    if constexpr (kLooksUpTails) return item.count * tiles_of(max(item.tail_tokens[0], item.tail_tokens[1]));
    return 0;
  }

  // To the next tile that there is: an item without tokens has none. False behind the last.
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
      cursor = {cursor.item, 0, item.tokens, item.head, -1, p_.req_to_token + item.slots};
    }
    return true;
  }

  // The same among the tiles of an item's tails. One that has ended has tiles without tokens.
  template <typename AnyItem>
  __device__ bool advance_in_tails(Cursor& cursor, const AnyItem& item) const {
    if (++cursor.tail >= all_tail_tiles(item)) return false;
    const bool second = cursor.tail % item.count != 0;
    cursor.begin = cursor.tail / item.count * kTokens;
    cursor.tokens = item.tail_tokens[second];
    cursor.slots = p_.req_to_token + (second ? item.second_tail : item.slots + item.tokens);
    return true;
  }

  // Where the slots of this thread's rows are, or of the rows from `row` on.
  __device__ int* slots(int tile, int row) const { return memory_.slots[kPlace][tile] + row * kRows; }
  __device__ static int next_slots(int tile) { return tile == Memory::kSlotTiles - 1 ? 0 : tile + 1; }

  // Asks for the slots of the next tile whose slots have not been asked for: each warp for those of its own rows.
  __device__ void issue_slots() {
    if (advance(read_) && column() < kRows) {
      const int row = read_.begin + own_row();
      copy4_or_zero(shared_address(slots(read_slots_, first_row()) + column()), read_.slots + row, row < read_.tokens);
    }
    read_slots_ = next_slots(read_slots_);
  }

  // This thread's bytes of a row of a tile that is not converted yet.
  __device__ static int source(int row) { return row * kDim + column() * kCopyBytes; }
  // Of the oldest tile that was asked for, or of the next.
  __device__ uint8_t* ahead() const { return memory_.ahead[kPlace] + at_ * kAheadBytes<kDim>; }

  // Issues the copies of a tile's K, next time of its V, or of those that it brings: always one commit group, empty after the last tile. The slots
  // of a later tile are copied along with the first: when they were loaded into registers, ptxas made the load wait at once.
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
      const int tokens =
          issue_cursor_.tokens - issue_cursor_.begin - first_row();  // that are left from this thread's first row on
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Zeros behind the end: what lies there may be NaN.
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

  // Converts the oldest copied tile of K or V into the ring's next stage.
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
          uint4 numbers;
          Kv::adjacent(bytes.x, numbers.x, numbers.y), Kv::adjacent(bytes.y, numbers.z, numbers.w);
          *reinterpret_cast<uint4*>(stage + next_row(panel_ ^ half * kCopyBytes, i * kStride)) = numbers;
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
  uint32_t source_, panel_;  // where this thread's first row is in a tile that is not converted yet, and in a stage
  bool issue_more_ = false, is_v_ = false;
};

}  // namespace pat
