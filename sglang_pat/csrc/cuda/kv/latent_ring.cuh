// The ring buffer of latents (MLA) in shared memory on Hopper, and its producers. V is the first columns of K, so a KV tile
// [64 tokens, dim] is copied once and multiplied twice. It lies in swizzled panels of 64 columns and has three pieces: the
// columns of V that the first warpgroup multiplies, those of the second, and the rest of K, its rope. Where the rope was,
// the tile's weights P are left for the other warpgroup. latent.cuh runs the producers and the consumers.
// Why so: benchmarks/notes/latents.md, "What an item waits for".
#pragma once

#include "../assign.cuh"
#include "../results.cuh"
#include "../ring.cuh"
#include "../smem.cuh"
#include "../wgmma_ptx.cuh"
#include "format.cuh"

namespace pat {

constexpr int kLatentProducers = 4 * kWarpSize;
constexpr int kLatentComputing = kLatentWarpgroups * kWarpgroupThreads;
constexpr int kLatentThreads = kLatentComputing + kLatentProducers;
constexpr int kLatentItems = 64;  // looked up at a time: memory is scarce
constexpr int kLatentTiles = 2;   // in the ring

enum LatentPiece { kFirstHalf, kSecondHalf, kRope, kPieces };

template <int kDim, int kVDim>
struct LatentSizes {
  static constexpr int kPanels = panels(kDim), kVPanels = panels(kVDim), kHalfPanels = kVPanels / kLatentWarpgroups;
  static constexpr int kTileBytes = kPanels * kPanelBytes, kStages = kLatentTiles * kPieces;
  static constexpr int kRopeColumns = kDim - kVDim;
  static_assert(kVDim % (kLatentWarpgroups * kPanelColumns) == 0 && kRopeColumns % 16 == 0);
  static_assert(kRopeColumns > 0 && kRopeColumns <= kPanelColumns, "P takes the rope's one panel");
  // The first panel of a piece, and of the next one.
  static constexpr int first_panel(int piece) { return piece * kHalfPanels; }
  static constexpr int end_panel(int piece) { return piece == kRope ? kPanels : (piece + 1) * kHalfPanels; }
  static constexpr int columns(int panel) { return panel < kVPanels ? kPanelColumns : kRopeColumns; }
};

// Q of narrow items goes through two slots, so that it is there when the item before ends; a wide item takes both.
constexpr int kLatentSlots = 2, kSlotRows = kWarpgroupRows / kLatentSlots;

struct LatentBarriers {
  RingBarriers<kLatentTiles * kPieces> ring;
  RingBarriers<kLatentSlots> queries;

  // The first warpgroup calls it; a __syncthreads has to follow. `again`: the barriers exist, and nobody uses them any more.
  __device__ void init(bool again) {
    const int i = thread_of_cta();
    const auto init_one = [&](uint64_t& barrier, int arrivals) {
      if (again) invalidate_barrier(shared_address(&barrier));
      init_barrier(shared_address(&barrier), arrivals);
    };
    if (i < kLatentTiles * kPieces) {
      init_one(ring.full[i], kLatentProducers);
      // Of the warps that read a piece last; both warpgroups read P.
      init_one(ring.empty[i], (i % kPieces == kRope ? kLatentWarpgroups : 1) * kWarpgroupWarps);
    }
    if (i < kLatentSlots) {
      init_one(queries.full[i], 2 * kLatentProducers);
      init_one(queries.empty[i], kLatentComputing);
    }
  }
};

// Position in the items of one look-up, and in the slots that their Q takes.
class LatentCursor {
 public:
  __device__ explicit LatentCursor(RingBarriers<kLatentSlots>& barriers) : barriers_(barriers) {}

  __device__ int item() const { return item_; }
  // Of an item with so many rows, the first one in Q's memory.
  __device__ int first_row(int rows) const { return rows > kSlotRows ? 0 : taken_ % kLatentSlots * kSlotRows; }
  __device__ void wait_full(int rows) const {
    for (int i = 0; i < slots(rows); ++i) wait_barrier(shared_address(&barriers_.full[slot(i)]), phase(i));
  }
  __device__ void wait_empty(int rows) const {
    for (int i = 0; i < slots(rows); ++i) wait_barrier(shared_address(&barriers_.empty[slot(i)]), phase(i) ^ 1);
  }
  // `function(barrier)` for every slot of the item, when it is full and when it is empty.
  template <typename Function>
  __device__ void for_full(int rows, const Function& function) const {
    for (int i = 0; i < slots(rows); ++i) function(shared_address(&barriers_.full[slot(i)]));
  }
  template <typename Function>
  __device__ void for_empty(int rows, const Function& function) const {
    for (int i = 0; i < slots(rows); ++i) function(shared_address(&barriers_.empty[slot(i)]));
  }
  __device__ void advance(int rows) { ++item_, taken_ += slots(rows); }

 private:
  __device__ static int slots(int rows) { return rows > kSlotRows ? kLatentSlots : 1; }
  __device__ int slot(int i) const { return (taken_ + i) % kLatentSlots; }
  __device__ int phase(int i) const { return (taken_ + i) / kLatentSlots % 2; }

  RingBarriers<kLatentSlots>& barriers_;
  int item_ = 0, taken_ = 0;
};

// What is known of an item's rows.
template <int kRows>
struct LatentRows {
  int targets[kRows];
  uint32_t sources[kRows], rope_sources[kRows];  // `source_of` each row
  uint64_t masks[Variant::kMasks ? kRows : 1];
  int behind[Variant::kLimits ? kRows : 1];
};

// The stages of a KV tile, for consumers. As each warpgroup sees every tile full, or hears so from the one that did, a wait
// never returns a round too early (`TileStages` in ring.cuh).
class LatentStages {
 public:
  // Of tile number `tile`, counted over all that went through the ring.
  __device__ LatentStages(RingBarriers<kLatentTiles * kPieces>& barriers, unsigned tile)
      : barriers_(barriers), place_(int(tile % kLatentTiles)), phase_(int(tile / kLatentTiles % 2)) {}

  __device__ int place() const { return place_; }
  __device__ void wait_full(int piece) const {
    wait_barrier(shared_address(&barriers_.full[place_ * kPieces + piece]), phase_);
  }
  // This warp is done with a piece.
  __device__ void release(int piece) const {
    if (lane_id() == 0) arrive(shared_address(&barriers_.empty[place_ * kPieces + piece]));
  }

 private:
  RingBarriers<kLatentTiles * kPieces>& barriers_;
  int place_, phase_;
};

template <int kDim, int kVDim>
struct LatentMemory {
  using Sizes = LatentSizes<kDim, kVDim>;
  alignas(1024) uint8_t ring[kLatentTiles][Sizes::kTileBytes];
  // [rows, dim], panels of 64 rows; in the end an item's output.
  alignas(1024) uint8_t q[Sizes::kTileBytes];
  LatentRows<kWarpgroupRows> rows[2];                           // of an item and the next one
  float row_max[kLatentWarpgroups][kWarpgroupRows];             // of a row up to the last tile of each warpgroup
  float maxima[kLatentWarpgroups][kWarpgroupWarps][kSlotRows];  // of a narrow item's tile by each warp, for the others
  // Of an item's rows in the end, for the other warpgroup, by each warp or all together; and of the next item.
  float sums[2][kLatentWarpgroups][kWarpgroupWarps * kSlotRows];
  LatentBarriers barriers;
  AssignedItems<kLatentItems> assigned;

  // Of a tile, and of its rope. A shuffle tells the compiler that the value is uniform in a warp.
  __device__ uint32_t tile_address(const LatentStages& stages) const {
    return __shfl_sync(~0u, shared_address(ring[stages.place()]), 0);
  }
  __device__ uint8_t* rope(const LatentStages& stages) { return ring[stages.place()] + Sizes::kVPanels * kPanelBytes; }
};

// Starts the product of Q and a tile, piece by piece as they come: `multiply(offset, adds)` for every 16 columns, with the
// offset of both operands' descriptors, and whether it adds to the product of those before.
template <typename Sizes, typename Function>
__device__ __forceinline__ void start_product_with_k(const LatentStages& stages, const Function& multiply) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    stages.wait_full(piece);
    fence_async_proxy();
    wgmma_fence();
#pragma unroll
    for (int panel = Sizes::first_panel(piece); panel < Sizes::end_panel(piece); ++panel) {
#pragma unroll
      for (int step = 0; step < Sizes::columns(panel) / 16; ++step)
        multiply(descriptor_offset(panel * kPanelBytes + step * 32), panel + step > 0);
    }
  }
  wgmma_commit();
}

// Where Q and the result of an item's row are, and what the row sees. Its mask is a copy on its way.
template <typename T, int kRows>
__device__ __forceinline__ void look_up_latent_row(const Params& p, const Item& item, int row, LatentRows<kRows>& to) {
  to.targets[row] = RowTarget::kNone, to.sources[row] = kNoSource;
  if constexpr (Variant::kLimits) to.behind[row] = 0;
  const RowQuery query(p, item, first_row_of(item) + row);
  if (!query.used(item)) return;
  const int position = query_of(p, item, query.member), head = item.first_head + query.head;
  const TokenHead at = p.token_head(position, head);
  to.targets[row] = RowTarget(p, head, position, target_of(p, item, query.member)).code();
  to.sources[row] = source_of<T>(p, at), to.rope_sources[row] = rope_source_of<T>(p, at);
  if constexpr (Variant::kMasks) copy8(shared_address(&to.masks[row]), p.masks + at.token);
  if constexpr (Variant::kLimits) to.behind[row] = tokens_behind(p, item, row, position);
}

// Copies Q of an item to shared memory, by the producer warps: 8 threads a row of a panel.
template <typename T, typename Product, int kDim, int kVDim>
class LatentQueries {
  using Sizes = LatentSizes<kDim, kVDim>;
  static constexpr int kThreads = kLatentProducers, kRowThreads = kPanelRow / kCopyBytes, kStride = kThreads / kRowThreads;
  static_assert(kThreads >= kWarpgroupRows && kStride % 8 == 0);

 public:
  __device__ LatentQueries(const Params& p, const Items<kLatentItems>& items, LatentMemory<kDim, kVDim>& memory)
      : p_(p), items_(items), memory_(memory), queries_(memory.barriers.queries) {}

  // Looks up the next item's rows. Returns whether there is room for its Q already, which has to be copied then or later.
  __device__ bool look_up() {
    const Item& item = items_.get(kWide, queries_.item());
    const int row = thread(), rows = item.m;
    // The item before the last has to have ended. A wide item's Q has waited for that.
    if (narrow_before_) queries_.wait_empty(kSlotRows);
    if (row < rows) look_up_latent_row<T>(p_, item, row, memory_.rows[queries_.item() % 2]);
    sync_threads(kProducerBarrier, kThreads);
    const bool narrow = rows <= kSlotRows, room = narrow_before_ && narrow;
    narrow_before_ = narrow;
    return room;
  }

  // Copies Q of the next item.
  __device__ void copy() {
    const int rows = items_.get(kWide, queries_.item()).m;
    const auto& from = memory_.rows[queries_.item() % 2];
    queries_.wait_empty(rows);
    const int column = thread() % kRowThreads, first = thread() / kRowThreads;
    uint8_t* const to = memory_.q + queries_.first_row(rows) * kPanelRow + panel_offset(first, column, 0);
#pragma unroll 1
    for (int i = first; i < rows; i += kStride) {
      const uint32_t source = from.sources[i], rope = from.rope_sources[i];
      const bool used = source != kNoSource;
      const char* const q = static_cast<const char*>(p_.q) + uint64_t(used ? source : 0) * kCopyBytes + column * kCopyBytes;
      const char* const q_rope =
          static_cast<const char*>(p_.q_rope) + uint64_t(used ? rope : 0) * kCopyBytes + column * kCopyBytes;
      const uint32_t row_at = shared_address(to) + (i - first) * kPanelRow;
#pragma unroll
      for (int panel = 0; panel < Sizes::kPanels; ++panel) {
        if (column < Sizes::columns(panel) / 8)
          copy16_or_zero(row_at + panel * kPanelBytes, panel < Sizes::kVPanels ? q + panel * kPanelRow : q_rope, used);
      }
    }
    if constexpr (!std::is_same_v<T, Product>) {
      commit_copies();
      wait_copies<0>();
#pragma unroll 1
      for (int i = first; i < rows; i += kStride) convert(to + (i - first) * kPanelRow, column);
    }
    queries_.for_full(rows, [](uint32_t barrier) { arrive_after_copies(barrier), arrive(barrier); });
    queries_.advance(rows);
  }

 private:
  __device__ static int thread() { return thread_of<kThreads>(); }

  // Converts in place what this thread has copied of a row.
  __device__ static void convert(uint8_t* row, int column) {
#pragma unroll 1
    for (int panel = 0; panel < Sizes::kPanels; ++panel) {
      if (column >= Sizes::columns(panel) / 8) continue;
      uint4& x = *reinterpret_cast<uint4*>(row + panel * kPanelBytes);
      x = convert_pairs<T, Product>(x);
    }
  }

  const Params& p_;
  const Items<kLatentItems>& items_;
  LatentMemory<kDim, kVDim>& memory_;
  LatentCursor queries_;
  bool narrow_before_ = true;  // the item before; in front of the first one both slots are empty
};

// Fills the ring. Latents of 8 bits become 16 bits in registers on the way, which always hold half a tile.
template <typename T, typename Kv, int kDim, int kVDim>
class LatentProducer {
  using Sizes = LatentSizes<kDim, kVDim>;
  static constexpr bool kConverts = Kv::kBytes == 1;
  // Threads of a row of a panel, each with 16 bytes of it; how far a thread's rows are apart; and how many they are.
  static constexpr int kRowThreads = kPanelColumns * Kv::kBytes / kCopyBytes;
  static constexpr int kStride = kLatentProducers / kRowThreads, kRows = kTokens / kStride;
  static constexpr int kWarpRows = kWarpSize / kRowThreads;  // neighbouring rows of a warp
  static constexpr int kRowLanes = kWarpSize / (kWarpRows * kRows), kLaneBytes = kDim * Kv::kBytes / kRowLanes;
  static constexpr int kChunks = kConverts ? Sizes::kPanels * kRows : 2, kAhead = kChunks / 2;  // a thread's, of a tile
  static_assert(kStride % 8 == 0 && kRowLanes == 2 && kChunks % kAhead == 0);

  struct Tile {
    int slot, left;  // of this lane's row; tokens from the tile on, of its item
  };

 public:
  __device__ LatentProducer(const Params& p, const Items<kLatentItems>& items, LatentMemory<kDim, kVDim>& memory)
      : p_(p), items_(items), memory_(memory), ring_(memory.barriers.ring), queries_(p, items, memory) {}

  // All items of one look-up. Where an item's Q has to wait until the item before has ended, its first tiles come before.
  __device__ void run() {
    Tile tile = next_tile(), next = next_tile();
    find_rows(tile, rows_);
    if constexpr (kConverts) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead_[i] = load(rows_, i);
    }
    const int count = items_.count(kWide);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int tokens = items_.get(kWide, i).tokens;
      bool room = false, q_left = true;
#pragma unroll 1
      for (int begin = 0; begin == 0 || begin < tokens; begin += kTokens) {
        if (tokens > 0) {
          if constexpr (kConverts) prefetch_rows(next);
          const Tile behind = next_tile();
          fill(tile.left, next);
          tile = next, next = behind;
        }
        if (begin == 0) room = queries_.look_up();
        if (q_left && (room || begin + kTokens >= min(tokens, kLatentTiles * kTokens))) queries_.copy(), q_left = false;
      }
    }
  }

 private:
  __device__ static int thread() { return thread_of<kLatentProducers>(); }
  __device__ static int column() { return thread() % kRowThreads; }
  __device__ static int first() { return thread() / kRowThreads; }
  // The row of a tile whose slot this lane reads.
  __device__ static int own_row() {
    const int lane = lane_id();
    return thread() / kWarpSize * kWarpRows + lane % kWarpRows + lane / kWarpRows % kRows * kStride;
  }

  // One of no tokens behind the last. Its slots are on their way.
  __device__ Tile next_tile() {
    while (item_ < items_.count(kWide)) {
      const Item& item = items_.get(kWide, item_);
      const int begin = begin_, left = item.tokens - begin;
      begin_ += kTokens;
      if (left <= kTokens) ++item_, begin_ = 0;
      if (left <= 0) continue;
      return {own_row() < left ? p_.req_to_token[item.slots + begin + own_row()] : 0, left};
    }
    return {0, 0};
  }

  // The one KV head of a slot.
  __device__ const char* latent(uint32_t slot) const { return static_cast<const char*>(p_.k) + uint64_t(slot) * p_.k_slot; }
  // Where this thread's rows of a tile begin for it.
  __device__ void find_rows(const Tile& tile, const char* (&rows)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      rows[i] = latent(__shfl_sync(~0u, tile.slot, lane_id() / kRowThreads + i * kWarpRows)) + column() * kCopyBytes;
  }

  // To L2, so that little is waited for in the ring, which holds few tiles.
  __device__ void prefetch_rows(const Tile& tile) const {
    if (own_row() >= tile.left) return;
    const char* const from = latent(tile.slot) + lane_id() / (kWarpRows * kRows) * kLaneBytes;
#pragma unroll
    for (int at = 0; at < kLaneBytes; at += kLineBytes) prefetch(from + at);
  }

  // Fills a tile of which `left` tokens are left. What is behind them becomes zero: weights are zero there, but memory may
  // hold NaN.
  __device__ void fill(int left, const Tile& next) {
    const char* next_rows[kRows];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece == kSecondHalf) find_rows(next, next_rows);  // the first half needs none of them
      uint8_t* const tile = memory_.ring[ring_.stage() / kPieces];
      ring_.wait_empty();
      if constexpr (kConverts)
        convert(piece, tile, left, next_rows);
      else
        copy(piece, tile, left);
      ring_.advance();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows_[i] = next_rows[i];
  }

  __device__ void copy(int piece, uint8_t* tile, int left) {
    const uint32_t to = shared_address(tile) + panel_offset(first(), column(), 0);
#pragma unroll
    for (int panel = Sizes::first_panel(piece); panel < Sizes::end_panel(piece); ++panel) {
      if (column() >= Sizes::columns(panel) / 8) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        copy16_or_zero(to + panel * kPanelBytes + i * kStride * kPanelRow, rows_[i] + panel * kPanelRow,
                       i * kStride < left - first());
    }
    arrive_after_copies(ring_.full_barrier());
  }

  // Takes a piece out of the registers, which then take what is half a tile further.
  __device__ void convert(int piece, uint8_t* tile, int left, const char* const (&next_rows)[kRows]) {
    // Two neighbouring chunks of 16 bytes: the swizzle changes the lowest bit of their number, and no offset below does.
    const uint32_t offset = panel_offset(first(), 2 * column(), 0);
    uint8_t *const low = tile + offset, *const high = tile + (offset ^ kCopyBytes);
#pragma unroll
    for (int i = Sizes::first_panel(piece) * kRows; i < Sizes::end_panel(piece) * kRows; ++i) {
      uint4 own = ahead_[i % kAhead];
      ahead_[i % kAhead] = i + kAhead < kChunks ? load(rows_, i + kAhead) : load(next_rows, i + kAhead - kChunks);
      if (i % kRows * kStride >= left - first()) own = make_uint4(0, 0, 0, 0);
      const int panel = i / kRows;
      if (!has(panel)) continue;
      const int at = panel * kPanelBytes + i % kRows * kStride * kPanelRow;
      *reinterpret_cast<uint4*>(low + at) = Kv::adjacent(own.x, own.y);
      *reinterpret_cast<uint4*>(high + at) = Kv::adjacent(own.z, own.w);
    }
    arrive(ring_.full_barrier());
  }

  // This thread's chunk number `i` of a tile; of some latent where the tile has no such row.
  __device__ static uint4 load(const char* const (&rows)[kRows], int i) {
    if (!has(i / kRows)) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(rows[i % kRows] + i / kRows * kPanelColumns);
  }
  // Whether a panel has this thread's columns.
  __device__ static bool has(int panel) { return column() < Sizes::columns(panel) / kCopyBytes; }

  const Params& p_;
  const Items<kLatentItems>& items_;
  LatentMemory<kDim, kVDim>& memory_;
  RingCursor<kLatentTiles * kPieces> ring_;
  LatentQueries<T, typename Kv::Product, kDim, kVDim> queries_;
  int item_ = 0, begin_ = 0;  // of the tile behind `next`
  const char* rows_[kRows];
  uint4 ahead_[kAhead];  // of a tile in 8 bits
};

}  // namespace pat
