// Producers of latents (MLA) of 8 bits on Hopper, which become 16 bits on the way into the ring (latent_ring.cuh). A thread
// copies each chunk of 16 bytes into the first of the two chunks that it becomes, and converts it there: so no thread waits
// for another one, and no byte that is on its way has a register. Of two groups of producers each has one of the ring's two
// places, so one waits for bytes while the other converts. latent.cuh runs them.
// Why so: benchmarks/notes/latents.md, "Latents of 8 bits".
#pragma once

#include "latent_ring.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kVDim>
class LatentConverter : LatentLoader<Kv, kDim, kVDim> {
  using Sizes = LatentSizes<kDim, kVDim>;
  using Loader = LatentLoader<Kv, kDim, kVDim>;
  using Loader::p_, Loader::own_row, Loader::first, Loader::column, Loader::has, Loader::kRows, Loader::kWarpRows,
      Loader::kStride;
  using Tile = typename Loader::Tile;
  static_assert(Kv::kBytes == 1 && kLatentGroups == kLatentTiles);

  static constexpr int kRowLanes = kWarpSize / (kWarpRows * kRows), kLaneBytes = kDim / kRowLanes;
  // Chunks that are read ahead. There are few registers, and masks take some.
  static constexpr int kAhead = Variant::kMasks ? 1 : 2;

 public:
  __device__ LatentConverter(const Params& p, const Items<kLatentItems>& items, LatentMemory<kDim, kVDim>& memory)
      : Loader(p),
        items_(items),
        memory_(memory),
        queries_(p, items, memory),
        number_(__shfl_sync(~0u, (thread_of_cta() - kLatentComputing) / kLatentProducers, 0)),
        begin_(number_ * kTokens) {}

  // All items of one look-up, of whose tiles the groups fill every second one. The last group copies Q too, as the first tile
  // is another one's; the order is that of `LatentProducer`.
  __device__ void run() {
    bool own = number_ == 0;  // the next tile
    Tile tile = next_tile(), next = next_tile();
    prefetch_rows(tile);
#pragma unroll 1
    for (int i = 0; i < items_.count(kWide); ++i) {
#pragma unroll 1
      for (int begin = 0;; begin += kTokens) {
        const int left = items_.get(kWide, i).tokens - begin;
        if (begin > 0 && left <= 0) break;
        if (left > 0) {
          if (own) {
            const LatentStages stages(memory_.barriers.ring, unsigned(number_));
            start(tile, stages);
            tile = next;
            prefetch_rows(tile);
            next = next_tile();
            finish(stages);
            number_ += kLatentGroups;
          }
          own = !own;
        }
        if (number_ % kLatentGroups < kLatentGroups - 1 || queries_.item() > i) continue;
        if (begin > 0 || queries_.look_up() || left <= kTokens) queries_.copy();
      }
    }
  }

 private:
  // One of no tokens behind the last. Its slots are on their way.
  __device__ Tile next_tile() {
    while (item_ < items_.count(kWide)) {
      const int tokens = items_.get(kWide, item_).tokens;
      if (begin_ < tokens) break;
      begin_ -= tiles_of(tokens) * kTokens;
      ++item_;
    }
    int left = 0;
    int64_t slot = 0;
    if (item_ < items_.count(kWide)) {
      const Item& item = items_.get(kWide, item_);
      left = item.tokens - begin_;
      slot = item.slots + begin_ + min(own_row(), left - 1);
      begin_ += kLatentGroups * kTokens;
    }
    return {p_.req_to_token[slot], left};
  }

  // To L2: the ring has little on its way.
  __device__ void prefetch_rows(const Tile& tile) const {
    if (own_row() >= tile.left) return;
    const char* const from = Loader::latent(tile.slot) + lane_id() / (kWarpRows * kRows) * kLaneBytes;
#pragma unroll
    for (int at = 0; at < kLaneBytes; at += kLineBytes) prefetch(from + at);
  }

  // This thread's first chunk of a tile in 8 bits, and of the two that it becomes the first one: the other one's number
  // differs in the lowest bit, also swizzled, and no offset of other panels and rows changes that bit.
  __device__ static uint32_t place() { return panel_offset(first(), 2 * column(), 0); }

  // Copies a tile as it is.
  __device__ void start(const Tile& tile, const LatentStages& stages) const {
    const char* rows[kRows];
    Loader::find_rows(tile, rows);
    const uint32_t to = memory_.tile_address(stages) + place();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      stages.wait_empty(piece);
      Loader::copy(piece, to, rows, tile.left);
      commit_copies();
    }
  }

  // Converts it.
  __device__ void finish(const LatentStages& stages) const {
    wait_copies<kRope - kFirstHalf>();
    convert<kFirstHalf>(stages);
    wait_copies<kRope - kSecondHalf>();
    convert<kSecondHalf>(stages);
    wait_copies<0>();
    convert<kRope>(stages);
  }
  template <int kPiece>
  __device__ void convert(const LatentStages& stages) const {
    uint8_t* const tile = memory_.ring[stages.place()];
    uint8_t *const low = tile + place(), *const high = tile + (place() ^ kCopyBytes);
    constexpr int kFirst = Sizes::first_panel(kPiece) * kRows, kEnd = Sizes::end_panel(kPiece) * kRows;
    const auto offset = [](int i) { return i / kRows * kPanelBytes + i % kRows * kStride * kPanelRow; };
    const auto load = [&](int i) { return *reinterpret_cast<const uint4*>(low + offset(i)); };
    if (has(Sizes::first_panel(kPiece))) {
      uint4 ahead[kAhead];
#pragma unroll
      for (int i = kFirst; i < kFirst + kAhead; ++i) ahead[i % kAhead] = load(i);
#pragma unroll
      for (int i = kFirst; i < kEnd; ++i) {
        const uint4 own = ahead[i % kAhead];
        if (i + kAhead < kEnd) ahead[i % kAhead] = load(i + kAhead);
        store(low + offset(i), own.x, own.y), store(high + offset(i), own.z, own.w);
      }
    }
    arrive(stages.full_barrier(kPiece));
  }
  __device__ static void store(uint8_t* to, uint32_t low, uint32_t high) {
    uint4 numbers;
    Kv::adjacent(low, numbers.x, numbers.y), Kv::adjacent(high, numbers.z, numbers.w);
    *reinterpret_cast<uint4*>(to) = numbers;
  }

  const Items<kLatentItems>& items_;
  LatentMemory<kDim, kVDim>& memory_;
  LatentQueries<T, typename Kv::Product, kDim, kVDim> queries_;
  int number_;            // of this group's next tile, counted over all
  int item_ = 0, begin_;  // of the tile behind `next`: its item, and where it begins there
};

}  // namespace pat
