// Loads records of pages, and the 16-bit tokens behind a request's last full page, to shared memory for narrow items: a
// warp copies for itself, a record or 16 tokens at a time. A stage holds a record (page_record.cuh), or K and then V of 16
// tokens in panels. Items begin with a page (packing/prices.py, `grain`), so what is left of an item is a page if it has 64
// tokens or more, else its tail.
#pragma once

#include <algorithm>

#include "../narrow_items.cuh"
#include "format.cuh"
#include "page_record.cuh"

namespace pat {

// Eight warps, so that a thread may have all registers: as fast as twelve or sixteen on long requests, and faster on few
// (benchmarks/notes/low-bit-kv.md, "The gate").
constexpr int kPageWarps = 8, kPageThreads = kPageWarps * kWarpSize;

template <typename Kv, int kDim>
struct PageSizes {
  using R = Record<Kv::kBits, kDim>;
  static constexpr int kPanel = kStepTokens * kPanelRow,
                       kTile = panels(kDim) * kPanel;  // K of 16 tokens; V follows it
  static constexpr int kStage = std::max(R::kBytes, 2 * kTile);
  // Bytes beside the stages in `PageKv::NarrowMemory`, whose size is a multiple of its alignment.
  static constexpr int kRest =
      int(sizeof(AssignedItems<kPageThreads>) + sizeof(NarrowStatistics<kPageWarps>)) + kPanelAlign;
  // Three were measured (benchmarks/notes/low-bit-kv.md, "The gate", as six halves); they fit 128 dimensions on Hopper.
  // With 64 dimensions there is room for more than four, which was not tried.
  static constexpr int kStages = std::min(4, (kSharedLimit - kRest) / (kPageWarps * kStage));
  static_assert(kStages >= 2 && kStage % kPanelRow == 0);
};

template <typename Kv, int kDim, int kM>
class PageLoader : protected NarrowItems<kPageThreads, kM, kPageWarps, PageSizes<Kv, kDim>::kStages,
                                         PageSizes<Kv, kDim>::kStage, kTokens> {
 protected:
  using S = PageSizes<Kv, kDim>;
  using Own = NarrowItems<kPageThreads, kM, kPageWarps, S::kStages, S::kStage, kTokens>;
  using Own::ended, Own::item, Own::next_item, Own::next_stage, Own::p_, Own::stage;
  using typename Own::Cursor, typename Own::WorkItems;
  static constexpr bool kReadAhead = false;  // Q is not loaded ahead

  using Own::Own;

  // What to copy: a record if there are 64 tokens, so many of a tail if fewer, nothing if negative. A warp whose team
  // leaves it nothing of an item has a chunk without tokens. `from` is a slot of the page, or the tail's row, exactly as
  // loaded: arithmetic here would wait for the load, which took a quarter of a warp's time
  // (benchmarks/notes/low-bit-kv.md, "Registers, and a shift behind a load"). `token` is the first of the tail to copy.
  struct Chunk {
    int from = 0, token = 0, head = 0, tokens = -1;
  };

  // Whether the cursor's chunk is a page; tokens to the next chunk; whether it is the item's last.
  static __device__ bool at_page(const Cursor& cursor) { return cursor.left >= kTokens; }
  static __device__ int step_of(const Cursor& cursor) { return at_page(cursor) ? cursor.step : kStepTokens; }
  static __device__ bool last(const Cursor& cursor) { return cursor.left <= step_of(cursor); }

  // Loads what the reader's chunk needs, to be copied next, and moves the reader on.
  __device__ void look_up(Cursor& reader) {
    ahead_ = Chunk();
    if (ended(reader)) return;
    const Item& item = this->item(reader);
    ahead_.head = item.kv.head;
    if (at_page(reader)) {
      ahead_.tokens = kTokens;
      ahead_.from = p_.req_to_token[item.slots + item.tokens - reader.left];
    } else {
      ahead_.tokens = max(0, min(kStepTokens, reader.left));
      ahead_.token = (item.tokens - reader.left) % kTokens;
      if (ahead_.tokens > 0) ahead_.from = int(p_.rows[item.query]);
    }
    if (last(reader))
      next_item(reader);
    else
      reader.left -= step_of(reader);
  }

  // Copies that chunk into stage `number`, then looks up the next.
  __device__ void copy_next(Cursor& reader, int& number) {
    const Chunk chunk = ahead_;
    if (chunk.tokens >= 0) {
      const uint32_t to = shared_address(stage(warp_id(), number));
      if (chunk.tokens == kTokens)
        copy_record(chunk, to);
      else if (chunk.tokens > 0)
        copy_tail(chunk, to);
      number = next_stage(number);
    }
    commit_copies();
    look_up(reader);
  }

 private:
  __device__ void copy_record(const Chunk& chunk, uint32_t to) const {
    constexpr int kBytes = S::R::kBytes, kAtOnce = kWarpSize * kCopyBytes;
    const int offset = lane_id() * kCopyBytes;
    const uint8_t* const from =
        p_.records + uint64_t(unsigned(chunk.from) / kTokens) * p_.page_bytes + uint32_t(chunk.head * kBytes) + offset;
#pragma unroll
    for (int i = 0; i < kBytes; i += kAtOnce)
      if (i + kAtOnce <= kBytes || i + offset < kBytes) copy16(to + i + offset, from + i);
  }

  __device__ void copy_tail(const Chunk& chunk, uint32_t to) const {
    constexpr int kRowCopies = kDim * 2 / kCopyBytes;
    const unsigned lane = lane_id(), column = lane % kRowCopies;
    const uint64_t first = uint64_t(unsigned(chunk.from)) * kTokens + unsigned(chunk.token);
    const char* const k = static_cast<const char*>(p_.k) + chunk.head * p_.k_head + column * kCopyBytes;
    const char* const v = static_cast<const char*>(p_.v) + chunk.head * p_.v_head + column * kCopyBytes;
#pragma unroll 1
    for (int row = lane / kRowCopies; row < kStepTokens; row += kWarpSize / kRowCopies) {
      const uint32_t address = to + panel_offset(row, column, S::kPanel);
      const bool valid = row < chunk.tokens;
      // Behind the end V must be zero, as weights are there: memory may hold NaN. Scores of K are masked.
      if (valid) copy16(address, k + (first + row) * p_.k_slot);
      copy16_or_zero(address + S::kTile, v + (valid ? (first + row) * p_.v_slot : 0), valid);
    }
  }

  Chunk ahead_;
};

}  // namespace pat
