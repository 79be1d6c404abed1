// Shared memory of wide items with plain KV, and their producer for KV of 16 bits. plain.cuh runs it.
#pragma once

#include "../ring.cuh"

namespace pat {

// Bytes of K or V of a KV tile in 8 bits, before the conversion.
template <int kDim>
constexpr int kAheadBytes = kTokens * kDim;

// How many KV tiles ahead of its copies a tile's slots are loaded: by then `ahead` stages have landed, which alternate
// between K and V unless each converting warpgroup has only one of them.
constexpr int slot_lead(int dim, int ahead) { return two_convert(dim) ? ahead : (ahead + 1) / 2; }
constexpr int converting_warpgroups(int dim) { return two_convert(dim) ? 2 : 1; }

// Behind the ring, 8-bit tiles of K or V that wait for conversion, `kAhead` for each converting warpgroup. Not there for
// 16-bit KV.
template <int kDim, int kStages, int kAhead>
struct WideTiles {
  static constexpr int kConverting = converting_warpgroups(kDim), kSlotTiles = slot_lead(kDim, kAhead) + 1;
  alignas(1024) uint8_t ring[kStages * kStageBytes<kDim>];
  alignas(kCopyBytes) uint8_t ahead[kConverting][kAhead * kAheadBytes<kDim>];
};
template <int kDim, int kStages>
struct WideTiles<kDim, kStages, 0> {
  static constexpr int kConverting = 1, kSlotTiles = 1;
  alignas(1024) uint8_t ring[kStages * kStageBytes<kDim>];
};

template <int kDim, int kStages, int kAhead>
struct WideMemory : WideTiles<kDim, kStages, kAhead> {
  using Tiles = WideTiles<kDim, kStages, kAhead>;
  static constexpr int kBuffers = query_buffers(kAhead > 0);
  WideQueries<kDim> queries[kBuffers];
  alignas(kCopyBytes) int slots[Tiles::kConverting][Tiles::kSlotTiles][kTokens];  // of the next KV tiles
};

// Producer for 16-bit KV. It loads the slots of the next KV tile and the queries of the next item while it copies this one:
// otherwise every copy would wait for them
// (benchmarks/notes/first-versions.md, "What reading scattered KV costs on an H200").
template <typename T, int kDim, int kVDim, int kStages>
class Producer : TileRows<kDim, kDim* int(sizeof(T))> {
  using Rows = TileRows<kDim, kDim* int(sizeof(T))>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::own_row, Rows::thread;
  using Memory = WideMemory<kDim, kStages, 0>;
  // Where rows of V are shorter, the threads of a row of K copy several of them at a time.
  static constexpr int kVRowThreads = row_threads(kVDim * int(sizeof(T))), kVRowsAtATime = kRowThreads / kVRowThreads;

  // This thread's chunk of a row, and where that of its first row lies in a stage.
  struct Place {
    unsigned column;
    uint32_t offset;
  };

 public:
  template <typename CtaMemory>
  __device__ Producer(const Params& p, const Items<threads(kDim)>& items, CtaMemory& memory)
      : p_(p),
        items_(items),
        memory_(memory.wide),
        k_(memory.barriers.ring),
        v_(memory.barriers.ring),
        queries_(p, items, memory.wide.queries, memory.barriers.queries) {
    v_.advance();
  }

  // All items of one look-up. Iteration -1 only reads ahead: one loop, so that the code for that is there once.
  __device__ void run() {
#pragma unroll 1
    for (int i = -1; i < items_.count(kWide); ++i) {
      if (i >= 0) queries_.copy();
      const int slot_ahead = slot_ahead_;
      read_ahead(i + 1);
      if (i >= 0) copy_kv(items_.get(kWide, i), memory_.queries[i % Memory::kBuffers], slot_ahead);
    }
  }

 private:
  // Of item `i`: its queries, and this lane's slot of its first KV tile.
  __device__ void read_ahead(int i) {
    queries_.read(i);
    if (i >= items_.count(kWide)) return;
    const Item& item = items_.get(kWide, i);
    if (own_row() < item.tokens) slot_ahead_ = p_.req_to_token[item.slots + seen_row(item, own_row())];
  }

  // `slot_ahead` is the slot of this lane's row of the first tile.
  __device__ void copy_kv(const Item& item, const WideQueries<kDim>& queries, int slot_ahead) {
    const unsigned column = thread() % kRowThreads, first = thread() / kRowThreads;
    const unsigned v_column = column % kVRowThreads;
    const char* k = fresh(static_cast<const char*>(p_.k) + item.kv.head * p_.k_head + column * 16);
    const char* v = fresh(static_cast<const char*>(p_.v) + item.kv.head * p_.v_head + v_column * 16);
    const Place k_at = {column, panel_offset(first, column, kPanelBytes)};
    const Place v_at = {v_column,
                        kVRowsAtATime == 1 ? k_at.offset : panel_offset(first_row<true>(), v_column, kPanelBytes)};
    const int own = own_row(), tokens = item.tokens;  // a copy, because ptxas would read shared memory again for each tile
    const int32_t* slots = p_.req_to_token + item.slots + own;
    // Consumers multiply K of their next tile before V of this one, so copies are issued in that order. Alternating
    // warpgroups skip a tile.
    const int behind = alternates_tiles<kDim>(item) ? kAlternating * kTokens : kTokens;
    const bool tails = Variant::kTails && item.tails;
    const int end = tails ? tokens : tokens + behind;                // with tails, `copy_tails` issues V of the last tile
    int next = own < tokens ? slot_ahead : 0, last = 0, before = 0;  // slots of K's next tile and of the last two
#pragma unroll 1
    for (int begin = 0; begin < end; begin += kTokens) {
      const int slot = next;
      slots += kTokens;
      next = begin + kTokens + own < tokens ? *slots : 0;
      if (begin < tokens) copy_rows<false>(tokens - begin, k_at, k, p_.k_slot, slot);
      if (begin >= behind) copy_rows<true>(tokens - begin + behind, v_at, v, p_.v_slot, behind > kTokens ? before : last);
      before = last, last = slot;
    }
    if constexpr (Variant::kTails) {
      if (tails) copy_tails(queries, item.count, (tokens - 1) % kTokens + 1, last, k_at, v_at, k, v);
    }
  }

  // Copies the tails, one KV tile of each query in turn; a tail that has ended gets empty stages. V of the last shared tile
  // is still to be copied: `last_left` tokens of it, `last` this lane's slot.
  __device__ void copy_tails(const WideQueries<kDim>& queries, int count, int last_left, int last, Place k_at, Place v_at,
                             const char* k, const char* v) {
    const int tiles = count * tail_tiles(queries, count), own = own_row();
    const auto left_of = [&](int member, int round) { return queries.tail_tokens[member] - round * kTokens; };
    const auto slot_of = [&](int member, int round) {
      const int32_t* slots = p_.req_to_token + queries.tail_slots[member] + round * kTokens + own;
      return own < left_of(member, round) ? *slots : 0;
    };
    int member = 0, round = 0, slot = slot_of(0, 0);
#pragma unroll 1
    for (int tile = 0; tile <= tiles; ++tile) {
      const int left = left_of(member, round), ahead = slot;
      if (++member == count) member = 0, ++round;
      if (tile + 1 < tiles) slot = slot_of(member, round);
      if (tile < tiles) copy_rows<false>(left, k_at, k, p_.k_slot, ahead);
      copy_rows<true>(last_left, v_at, v, p_.v_slot, last);
      last_left = left, last = ahead;
    }
  }

  // Which of the rows of V that are copied at a time is this thread's.
  static __device__ int turn() { return kVRowsAtATime == 1 ? 0 : int(thread() % kRowThreads / kVRowThreads); }
  // The first row of a tile of K or V that this thread copies.
  template <bool kIsV>
  static __device__ int first_row() {
    return int(thread() / kRowThreads) + (kIsV ? turn() * kStride : 0);
  }

  // Fills one stage with a tile, from whose first token on `left` are left. All lanes of the warp have to call it.
  template <bool kIsV>
  __device__ void copy_rows(int left, Place at, const char* pool, uint32_t stride, int slot) {
    auto& cursor = kIsV ? v_ : k_;
    cursor.wait_empty();
    const int tokens = left - first_row<kIsV>();  // from this thread's first row on
    const bool full = left >= kTokens;
    const uint32_t to = shared_address(memory_.ring) + cursor.stage() * kStageBytes<kDim>;
    constexpr int kRowCopies = (kIsV ? kVDim : kDim) * int(sizeof(T)) / kCopyBytes, kAtATime = kIsV ? kVRowsAtATime : 1;
    const int lane = Rows::slot_lane() + (kIsV ? turn() : 0);
    if (full) {
#pragma unroll
      for (int i = 0; i < kRows; i += kAtATime) {
        const uint32_t place = to + next_row(at.offset, i * kStride), row = __shfl_sync(~0u, slot, lane + i);
        if (at.column < kRowCopies) copy16(place, pool + uint64_t(row) * stride);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kRows; i += kAtATime) {
        const bool valid = i * kStride < tokens;
        const uint32_t row = __shfl_sync(~0u, slot, lane + i);  // 0 behind the end
        // Behind the end V must be zero, as weights are there: memory may hold NaN. Scores of K are masked.
        if (int(at.column) < kRowCopies && (kIsV || valid))
          copy16_or_zero(to + next_row(at.offset, i * kStride), pool + uint64_t(row) * stride, valid);
      }
    }
    arrive_after_copies(cursor.full_barrier());
    cursor.advance(2);
  }

  const Params& p_;
  const Items<threads(kDim)>& items_;
  Memory& memory_;
  RingCursor<kStages> k_, v_;
  QueryProducer<T, T, kDim, Memory::kBuffers> queries_;
  int slot_ahead_ = 0;
};

}  // namespace pat
