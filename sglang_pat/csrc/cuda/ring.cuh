// The ring in shared memory through which K and V of wide items go: units of 64 tokens, K and V by turns. Some warps fill
// it, the others compute; barriers tell them what is full and what is free.
#pragma once

#include "items.cuh"
#include "ptx.cuh"

namespace pat {

template <int kUnits>
struct RingBarriers {
  alignas(8) uint64_t full[kUnits], free[kUnits];
};

template <int kDim>
constexpr int kUnitBytes = panels(kDim) * kTokens * kPanelRow;

// A position in the ring: of K at even units, of V at odd ones.
template <int kDim, int kUnits>
class RingCursor {
 public:
  __device__ RingCursor(uint8_t* ring, RingBarriers<kUnits>& barriers) : ring_(ring), barriers_(barriers) {}

  __device__ uint32_t memory() const { return shared_address(ring_) + unit_ * kUnitBytes<kDim>; }
  __device__ void wait_full() const { wait_barrier(shared_address(&barriers_.full[unit_]), phase_); }
  // At first everything is free: the phase before the first has passed.
  __device__ void wait_free() const { wait_barrier(shared_address(&barriers_.free[unit_]), phase_ ^ 1); }
  __device__ void fill_after_copies() const { arrive_after_copies(shared_address(&barriers_.full[unit_])); }
  // To be arrived at by every computing warp.
  __device__ uint32_t free_barrier() const { return shared_address(&barriers_.free[unit_]); }
  __device__ void advance(int units = 1) {
    unit_ += units;
    if (unit_ >= kUnits) unit_ -= kUnits, phase_ ^= 1;
  }

 private:
  uint8_t* const ring_;
  RingBarriers<kUnits>& barriers_;
  int unit_ = 0, phase_ = 0;
};

// The warps that fill the ring. Slots of the next tile are read while this one's rows are copied: their latency
// would otherwise stand before every copy (benchmarks/NOTES.md).
template <int kDim, int kUnits>
class Loader {
  static constexpr int kRowThreads = row_threads(kDim);
  static constexpr int kRows = kTokens * kRowThreads / loaders(kDim);  // that a thread copies: one after the other

 public:
  __device__ Loader(const Params& p, Items& items, const RingCursor<kDim, kUnits>& cursor)
      : p_(p), items_(items), cursor_(cursor) {}

  __device__ void run(int tiles) {
    items_.restart();
    do {
      for (uint64_t pending = items_.with_tiles(tiles); pending != 0; pending &= pending - 1)
        run_item(items_[__ffsll(pending) - 1]);
    } while (items_.next());
    wait_copies<0>();
  }

 private:
  __device__ void run_item(const Item& item) {
    const int thread = fresh(threadIdx.x) % loaders(kDim), column = thread % kRowThreads;
    const int first = thread / kRowThreads * kRows;
    const char* k = static_cast<const char*>(p_.k) + item.head * p_.k_head + column * 16;
    const char* v = static_cast<const char*>(p_.v) + item.head * p_.v_head + column * 16;
    const int32_t* slots = p_.req_to_token + item.slots + first;
    const uint32_t offset = panel_offset(first, column, kTokens * kPanelRow);
    int slot[kRows], next[kRows];
    read_slots(next, slots, item.tokens - first);
#pragma unroll 1
    for (int begin = 0; begin < item.tokens; begin += kTokens) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) slot[i] = next[i];
      read_slots(next, slots + begin + kTokens, item.tokens - begin - kTokens - first);
      const bool full = kDim / 8 == kRowThreads && item.tokens - begin >= kTokens;
      cursor_.wait_free();
      copy_rows<false>(full, column, offset, k, p_.k_slot, slot);
      cursor_.fill_after_copies();
      cursor_.advance();
      cursor_.wait_free();
      copy_rows<true>(full, column, offset, v, p_.v_slot, slot);
      cursor_.fill_after_copies();
      cursor_.advance();
    }
  }

  // Of the `tokens` that are left from this thread's first row on; -1 behind them.
  __device__ static void read_slots(int (&to)[kRows], const int32_t* from, int tokens) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) to[i] = i < tokens ? from[i] : -1;
  }

  template <bool kIsV>
  __device__ void copy_rows(bool full, int column, uint32_t offset, const char* pool, uint32_t stride,
                            const int (&slot)[kRows]) const {
    if (full) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) copy16(place(offset, i), pool + uint64_t(uint32_t(slot[i])) * stride);
    } else if (column < kDim / 8) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // V must be zero behind the end, where its weight is: what lies there may be NaN. K's scores are masked.
        if (kIsV || slot[i] >= 0)
          copy16_or_zero(place(offset, i), pool + uint64_t(max(slot[i], 0)) * stride, slot[i] >= 0);
      }
    }
  }

  __device__ uint32_t place(uint32_t offset, int i) const { return cursor_.memory() + next_row(offset, i); }

  const Params& p_;
  Items& items_;
  RingCursor<kDim, kUnits> cursor_;
};

}  // namespace pat
