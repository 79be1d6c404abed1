// Loads K and V of narrow items to shared memory. Each warp issues cp.async for itself, chunk by chunk; slots are loaded a
// few chunks ahead of their copies. A stage holds a chunk's K, then its V, in swizzled panels of 128 bytes a row
// (smem.cuh); 8-bit KV is copied as bytes.
#pragma once

#include "../narrow_items.cuh"
#include "format.cuh"

namespace pat {

template <typename Kv, int kDim, int kVDim>
struct NarrowSizes {
  static constexpr int kTokens = 2 * kStepTokens / Kv::kBytes;  // of a chunk, the unit of a copy
  static constexpr int kPanel = kTokens * kPanelRow;
  static constexpr int kTile = row_panels(kDim * Kv::kBytes) * kPanel;  // K of a chunk; V follows it
  static constexpr int kStage = kTile + row_panels(kVDim * Kv::kBytes) * kPanel;
  static constexpr int kWarp = kNarrowStages * kStage;
};

// Loader of a warp whose query tile has `kM` rows; NarrowWarp (plain_narrow.cuh) drives it. With its members in this order
// the compiler makes the same code as when both were one class.
template <typename Kv, int kDim, int kVDim, int kM, int kWarps>
class NarrowLoader : protected NarrowItems<threads(kDim), kM, kWarps, kNarrowStages, NarrowSizes<Kv, kDim, kVDim>::kStage,
                                           NarrowSizes<Kv, kDim, kVDim>::kTokens> {
 protected:
  using S = NarrowSizes<Kv, kDim, kVDim>;
  using Own = NarrowItems<threads(kDim), kM, kWarps, kNarrowStages, S::kStage, S::kTokens>;
  using Own::ended, Own::item, Own::items_, Own::next_item, Own::next_stage, Own::p_, Own::stage;
  using typename Own::Cursor, typename Own::WorkItems;
  static constexpr int kChunkTokens = S::kTokens;
  // Where registers suffice: 32 tokens at a time (two chunks of 16-bit KV), and Q loaded an item ahead.
  static constexpr bool kReadAhead = kDim * (kM / 8) <= 128, kTwoSteps = kReadAhead && !(Kv::kBytes == 1 && kM > 8);
  static constexpr bool kPairs = kTwoSteps && kChunkTokens == kStepTokens;
  static constexpr int kSlotsAhead = kPairs ? 2 : 1;  // chunks whose slots are in flight
  static constexpr int kRowCopies = kDim * Kv::kBytes / kCopyBytes, kRowThreads = row_threads(kDim * Kv::kBytes);
  static constexpr int kVRowCopies = kVDim * Kv::kBytes / kCopyBytes, kVRowThreads = row_threads(kVDim * Kv::kBytes);
  // Rows of K and V that a lane copies, consecutive ones.
  static constexpr int kRows = kChunkTokens * kRowThreads / kWarpSize, kVRows = kChunkTokens * kVRowThreads / kWarpSize;
  static constexpr bool kSameRows = kRows == kVRows;

  // A chunk to copy: the slot of this lane's token, the KV head, and the tokens; negative if there is none.
  struct Chunk {
    int slot = 0, head = 0, tokens = -1;
  };

  using Own::Own;

  // Loads the slots of the reader's chunk behind those loaded before, and moves the reader on.
  __device__ void read_slots(Cursor& reader) {
#pragma unroll
    for (int i = 0; i + 1 < kSlotsAhead; ++i) ahead_[i] = ahead_[i + 1];
    Chunk& chunk = ahead_[kSlotsAhead - 1];
    chunk = Chunk();
    if (ended(reader)) return;
    const Item& item = this->item(reader);
    chunk.head = item.kv.head;
    chunk.tokens = max(0, min(kChunkTokens, reader.left));
    if (lane_id() < chunk.tokens) chunk.slot = p_.req_to_token[item.slots + item.tokens - reader.left + lane_id()];
    if (reader.last())
      next_item(reader);
    else
      reader.left -= reader.step;
  }

  // Copies K and V of the chunk whose slots were loaded first.
  __device__ void copy_next(Cursor& reader, int& number) {
    const Chunk chunk = ahead_[0];
    if (chunk.tokens >= 0) {
      const unsigned lane = lane_id(), column = lane % kRowThreads, first = lane / kRowThreads * kRows;
      const unsigned v_column = lane % kVRowThreads, v_first = lane / kVRowThreads * kVRows;
      const char* k = fresh(static_cast<const char*>(p_.k) + chunk.head * p_.k_head + column * 16);
      const char* v = fresh(static_cast<const char*>(p_.v) + chunk.head * p_.v_head + v_column * 16);
      const uint32_t to = shared_address(stage(warp_id(), number)) + panel_offset(first, column, S::kPanel);
      const uint32_t v_to =
          kSameRows ? to : shared_address(stage(warp_id(), number)) + panel_offset(v_first, v_column, S::kPanel);
      const auto slot_of_v = [&](int i, uint32_t slot) {
        return kSameRows ? slot : __shfl_sync(~0u, chunk.slot, v_first + i);
      };
      const bool in_k = column < kRowCopies, in_v = v_column < kVRowCopies;
      if (chunk.tokens == kChunkTokens) {
        const auto copy_rows = [&](auto... policy) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i);
            if (in_k) copy16(next_row(to, i), k + uint64_t(slot) * p_.k_slot, policy...);
            if (i >= kVRows) continue;
            const uint32_t v_slot = slot_of_v(i, slot);
            if (in_v) copy16(next_row(v_to, i) + S::kTile, v + uint64_t(v_slot) * p_.v_slot, policy...);
          }
        };
        // Without a cache policy where none is needed: even the default one takes time. Drafts' tiles of 16 rows never have
        // one: two copies of the code took small batches 1 %
        // (benchmarks/notes/code-placement.md, "Less code for drafts of 16 rows").
        if (!(Variant::kMasks && kM > kSingleM) && items_.parts_stay())
          copy_rows(leaves_first());
        else
          copy_rows();
      } else {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i), place = next_row(to, i);
          const bool valid = first + i < chunk.tokens, v_valid = kSameRows ? valid : v_first + i < chunk.tokens;
          // Behind the end V must be zero, as weights are there: memory may hold NaN. Scores of K are masked.
          if (in_k && valid) copy16(place, k + uint64_t(slot) * p_.k_slot);
          if (i >= kVRows) continue;
          const uint32_t v_slot = slot_of_v(i, slot), v_place = kSameRows ? place : next_row(v_to, i);
          if (in_v) copy16_or_zero(v_place + S::kTile, v + (v_valid ? uint64_t(v_slot) * p_.v_slot : 0), v_valid);
        }
      }
      number = next_stage(number);
    }
    commit_copies();
    read_slots(reader);
  }

  int user_ = 0;  // the item that NarrowWarp computes, with Variant::kMasks
  Chunk ahead_[kSlotsAhead];
};

}  // namespace pat
