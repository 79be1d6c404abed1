// The ring buffer of latents (MLA) in shared memory on Hopper, and its producers. V is the first columns of K, so a KV tile
// [64 tokens, dim] is copied once and multiplied twice. It lies in swizzled panels of 64 columns and has three pieces: the
// columns of V that the first warpgroup multiplies, those of the second, and the rest of K, its rope. Where the rope was,
// the tile's weights P are left for the other warpgroup. latent_forward.cuh runs the producers and the consumers. Compiled
// and emulated, not timed yet.
#pragma once

#include "assign.cuh"
#include "kv_format.cuh"
#include "results.cuh"
#include "ring.cuh"
#include "smem.cuh"
#include "wgmma_ptx.cuh"

namespace pat {

constexpr int kLatentProducers = 4 * kWarpSize;
constexpr int kLatentComputing = kLatentWarpgroups * kWarpgroupThreads;
constexpr int kLatentThreads = kLatentComputing + kLatentProducers;
constexpr int kLatentItems = 64;  // looked up at a time: memory is scarce
constexpr int kLatentTiles = 2;   // in the ring
constexpr int kPanelBytes = kTokens * kPanelRow;

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

struct LatentBarriers {
  RingBarriers<kLatentTiles * kPieces> ring;
  RingBarriers<1> queries;

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
    if (i == 0) {
      init_one(queries.full[0], 2 * kLatentProducers);
      init_one(queries.empty[0], kLatentComputing);
    }
  }
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
  // Of one item, [rows, dim], panels of 64 rows; in the end its output.
  alignas(1024) uint8_t q[Sizes::kTileBytes];
  int targets[kWarpgroupRows];
  uint32_t sources[kWarpgroupRows], rope_sources[kWarpgroupRows];  // `source_of` each row
  uint64_t masks[Variant::kMasks ? kWarpgroupRows : 1];
  int behind[Variant::kLimits ? kWarpgroupRows : 1];
  float row_max[kLatentWarpgroups][kWarpgroupRows];  // of a row up to the last tile of each warpgroup
  // Of a row by each warp, for the others: maxima of a tile, in the end sums.
  float exchange[kLatentWarpgroups][kWarpgroupWarps][kWarpgroupRows];
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
template <typename T, typename Memory>
__device__ __forceinline__ void look_up_latent_row(const Params& p, const Item& item, int row, Memory& to) {
  to.targets[row] = RowTarget::kNone, to.sources[row] = kNoSource;
  if constexpr (Variant::kLimits) to.behind[row] = 0;
  const RowQuery query(p, item, row);
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

  // Copies Q of the next item.
  __device__ void copy() {
    const Item& item = items_.get(kWide, queries_.item());
    const int row = thread(), rows = item.m;
    queries_.wait_empty();
    auto& to = memory_;
    if (row < rows)
      look_up_latent_row<T>(p_, item, row, to);
    else if (row < kWarpgroupRows)
      to.targets[row] = RowTarget::kNone;
    sync_threads(kProducerBarrier, kThreads);
    const int column = thread() % kRowThreads, first = thread() / kRowThreads;
    const uint32_t offset = panel_offset(first, column, 0);
#pragma unroll 1
    for (int i = first; i < rows; i += kStride) {
      const uint32_t source = to.sources[i], rope = to.rope_sources[i];
      const bool used = source != kNoSource;
      const char* const q = static_cast<const char*>(p_.q) + uint64_t(used ? source : 0) * kCopyBytes + column * kCopyBytes;
      const char* const q_rope =
          static_cast<const char*>(p_.q_rope) + uint64_t(used ? rope : 0) * kCopyBytes + column * kCopyBytes;
      const uint32_t row_at = shared_address(to.q) + offset + (i - first) * kPanelRow;
#pragma unroll
      for (int panel = 0; panel < Sizes::kPanels; ++panel) {
        if (column < Sizes::columns(panel) / 8)
          copy16_or_zero(row_at + panel * kPanelBytes, panel < Sizes::kVPanels ? q + panel * kPanelRow : q_rope, used);
      }
    }
    if constexpr (std::is_same_v<T, Product>) {
      arrive_after_copies(queries_.full_barrier());
    } else {
      commit_copies();
      wait_copies<0>();
#pragma unroll 1
      for (int i = first; i < rows; i += kStride) convert(to.q + offset + (i - first) * kPanelRow, column);
      arrive(queries_.full_barrier());
    }
    arrive(queries_.full_barrier());
    queries_.advance();
  }

 private:
  __device__ static int thread() { return thread_of<kThreads>(); }

  // Converts in place what this thread has copied of a row.
  __device__ static void convert(uint8_t* row, int column) {
#pragma unroll 1
    for (int panel = 0; panel < Sizes::kPanels; ++panel) {
      if (column >= Sizes::columns(panel) / 8) continue;
      uint4& x = *reinterpret_cast<uint4*>(row + panel * kPanelBytes);
      const uint4 own = x;
      x = make_uint4(convert_pair<T, Product>(own.x), convert_pair<T, Product>(own.y), convert_pair<T, Product>(own.z),
                     convert_pair<T, Product>(own.w));
    }
  }

  const Params& p_;
  const Items<kLatentItems>& items_;
  LatentMemory<kDim, kVDim>& memory_;
  QueryCursor<1> queries_;
};

// Fills the ring. Latents of 8 bits become 16 bits in registers on the way.
template <typename T, typename Kv, int kDim, int kVDim>
class LatentProducer {
  using Sizes = LatentSizes<kDim, kVDim>;
  static constexpr bool kConverts = Kv::kBytes == 1;
  // Threads of a row of a panel, each with 16 bytes of it; how far a thread's rows are apart; and how many they are.
  static constexpr int kRowThreads = kPanelColumns * Kv::kBytes / kCopyBytes;
  static constexpr int kStride = kLatentProducers / kRowThreads, kRows = kTokens / kStride;
  static constexpr int kWarpRows = kWarpSize / kRowThreads;  // neighbouring rows of a warp
  static_assert(kStride % 8 == 0 && kWarpRows * kRows <= kWarpSize);

 public:
  __device__ LatentProducer(const Params& p, const Items<kLatentItems>& items, LatentMemory<kDim, kVDim>& memory)
      : p_(p), items_(items), memory_(memory), ring_(memory.barriers.ring), queries_(p, items, memory) {}

  // All items of one look-up. The first tiles of an item come before its Q, which waits until the item before has ended.
  __device__ void run() {
    const int count = items_.count(kWide);
    int slot = count > 0 ? first_slot(0) : 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Item& item = items_.get(kWide, i);
      const int tokens = item.tokens;
      const int32_t* slots = p_.req_to_token + item.slots + own_row();
      const char* const from = static_cast<const char*>(p_.k) + item.head * p_.k_head + column() * kCopyBytes;
      bool q_left = true;
#pragma unroll 1
      for (int begin = 0; begin < tokens; begin += kTokens) {
        if (begin == kLatentTiles * kTokens) queries_.copy(), q_left = false;
        const int own = slot;
        slots += kTokens;
        slot = begin + kTokens + own_row() < tokens ? *slots : 0;
        fill(from, own, tokens - begin);
      }
      if (q_left) queries_.copy();
      if (i + 1 < count) slot = first_slot(i + 1);
    }
  }

 private:
  __device__ static int thread() { return thread_of<kLatentProducers>(); }
  __device__ static int column() { return thread() % kRowThreads; }
  // The row of a tile whose slot this lane reads.
  __device__ static int own_row() {
    const int lane = lane_id();
    return thread() / kWarpSize * kWarpRows + lane % kWarpRows + lane / kWarpRows % kRows * kStride;
  }
  __device__ int first_slot(int i) const {
    const Item& item = items_.get(kWide, i);
    return own_row() < item.tokens ? p_.req_to_token[item.slots + own_row()] : 0;
  }

  // Copies a tile of which `left` tokens are left; `slot` is this lane's. What is behind them becomes zero: weights are
  // zero there, but memory may hold NaN.
  __device__ void fill(const char* from, int slot, int left) {
    const int first = thread() / kRowThreads;
    const char* rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      rows[i] = from + uint64_t(uint32_t(__shfl_sync(~0u, slot, lane_id() / kRowThreads + i * kWarpRows))) * p_.k_slot;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint8_t* const tile = memory_.ring[ring_.stage() / kPieces];
      if constexpr (kConverts)
        convert(piece, rows, tile, left - first);
      else
        copy(piece, rows, tile, left - first);
      ring_.advance();
    }
  }

  __device__ void copy(int piece, const char* const (&rows)[kRows], uint8_t* tile, int left) {
    const uint32_t to = shared_address(tile) + panel_offset(thread() / kRowThreads, column(), 0);
    ring_.wait_empty();
#pragma unroll
    for (int panel = Sizes::first_panel(piece); panel < Sizes::end_panel(piece); ++panel) {
      if (column() >= Sizes::columns(panel) / 8) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        copy16_or_zero(to + panel * kPanelBytes + i * kStride * kPanelRow, rows[i] + panel * kPanelRow, i * kStride < left);
    }
    arrive_after_copies(ring_.full_barrier());
  }

  __device__ void convert(int piece, const char* const (&rows)[kRows], uint8_t* tile, int left) {
    const int first_panel = Sizes::first_panel(piece);
    uint8_t* const to = tile + first_panel * kPanelBytes + panel_offset(thread() / kRowThreads, 2 * column(), 0);
    constexpr int kPiecePanels = std::max(Sizes::kHalfPanels, 1);
    uint4 bytes[kPiecePanels][kRows];
    // All loads before the wait.
#pragma unroll
    for (int panel = 0; panel < kPiecePanels; ++panel) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        bytes[panel][i] = make_uint4(0, 0, 0, 0);
        if (has(first_panel + panel, piece) && i * kStride < left)
          bytes[panel][i] = *reinterpret_cast<const uint4*>(rows[i] + (first_panel + panel) * kPanelColumns);
      }
    }
    ring_.wait_empty();
#pragma unroll
    for (int panel = 0; panel < kPiecePanels; ++panel) {
      if (!has(first_panel + panel, piece)) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint4 own = bytes[panel][i];
        uint8_t* const row = to + panel * kPanelBytes + i * kStride * kPanelRow;
        store(row, own.x, own.y);
        // The next chunk: the swizzle changes its lowest bit.
        store(tile + ((row - tile) ^ kCopyBytes), own.z, own.w);
      }
    }
    arrive(ring_.full_barrier());
  }

  // Whether a piece has the panel, and that this thread's columns.
  __device__ static bool has(int panel, int piece) {
    return panel < Sizes::end_panel(piece) && column() < Sizes::columns(panel) / kCopyBytes;
  }
  __device__ static void store(uint8_t* to, uint32_t low, uint32_t high) {
    uint4 numbers;
    Kv::adjacent(low, numbers.x, numbers.y), Kv::adjacent(high, numbers.z, numbers.w);
    *reinterpret_cast<uint4*>(to) = numbers;
  }

  const Params& p_;
  const Items<kLatentItems>& items_;
  LatentMemory<kDim, kVDim>& memory_;
  RingCursor<kLatentTiles * kPieces> ring_;
  LatentQueries<T, typename Kv::Product, kDim, kVDim> queries_;
};

}  // namespace pat
