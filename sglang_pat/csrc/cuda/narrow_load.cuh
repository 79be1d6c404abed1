// How K and V of narrow items come to shared memory: each warp copies for itself, chunk after chunk, and slots are read a few
// chunks ahead of the copies that need them.
#pragma once

#include "kv_format.cuh"
#include "narrow_items.cuh"

namespace pat {

template <typename Kv, int kDim, int kVDim>
struct NarrowSizes {
  static constexpr int kTokens = 2 * kStepTokens / Kv::kBytes;  // of a chunk, which a warp copies at a time
  static constexpr int kPanel = kTokens * kPanelRow;
  static constexpr int kTile = row_panels(kDim * Kv::kBytes) * kPanel;  // a chunk's K; its V is behind it
  static constexpr int kStage = kTile + row_panels(kVDim * Kv::kBytes) * kPanel;
  static constexpr int kWarp = kNarrowStages * kStage;
};

// Copies what a warp reads whose tile has `kM` rows of Q; NarrowWarp (narrow.cuh) says when. In this order of members the compiler makes
// the same instructions as when both were one class.
template <typename Kv, int kDim, int kVDim, int kM, int kWarps>
class NarrowLoader : protected NarrowItems<threads(kDim), kM, kWarps, kNarrowStages, NarrowSizes<Kv, kDim, kVDim>::kStage,
                                           NarrowSizes<Kv, kDim, kVDim>::kTokens> {
 protected:
  using S = NarrowSizes<Kv, kDim, kVDim>;
  using Own = NarrowItems<threads(kDim), kM, kWarps, kNarrowStages, S::kStage, S::kTokens>;
  using Own::ended, Own::item, Own::items_, Own::next_item, Own::next_stage, Own::p_, Own::stage;
  using typename Own::Cursor, typename Own::WorkItems;
  static constexpr int kChunkTokens = S::kTokens;
  // 32 tokens at a time, which with 16 bits are two chunks, and Q an item ahead, where registers suffice.
  static constexpr bool kReadAhead = kDim * (kM / 8) <= 128, kTwoSteps = kReadAhead && !(Kv::kBytes == 1 && kM > 8);
  static constexpr bool kPairs = kTwoSteps && kChunkTokens == kStepTokens;
  static constexpr int kSlotsAhead = kPairs ? 2 : 1;  // chunks whose slots are on their way
  static constexpr int kRowCopies = kDim * Kv::kBytes / kCopyBytes, kRowThreads = row_threads(kDim * Kv::kBytes);
  static constexpr int kVRowCopies = kVDim * Kv::kBytes / kCopyBytes;   // by the first of K's threads
  static constexpr int kRows = kChunkTokens * kRowThreads / kWarpSize;  // that a lane copies: one after the other

  // A chunk to be copied: the slot of this lane's token, the KV head, and how many tokens; negative if there is no chunk.
  struct Chunk {
    int slot = 0, head = 0, tokens = -1;
  };

  using Own::Own;

  // Reads the slots of the reader's chunk, to be copied after those read before, and moves on to the next.
  __device__ void read_slots(Cursor& reader) {
#pragma unroll
    for (int i = 0; i + 1 < kSlotsAhead; ++i) ahead_[i] = ahead_[i + 1];
    Chunk& chunk = ahead_[kSlotsAhead - 1];
    chunk = Chunk();
    if (ended(reader)) return;
    const Item& item = this->item(reader);
    chunk.head = item.head;
    chunk.tokens = max(0, min(kChunkTokens, reader.left));
    if (lane_id() < chunk.tokens) chunk.slot = p_.req_to_token[item.slots + item.tokens - reader.left + lane_id()];
    if (reader.last())
      next_item(reader);
    else
      reader.left -= reader.step;
  }

  // Copies K and V of the chunk whose slots were read first.
  __device__ void copy_next(Cursor& reader, int& number) {
    const Chunk chunk = ahead_[0];
    if (chunk.tokens >= 0) {
      const unsigned lane = lane_id(), column = lane % kRowThreads, first = lane / kRowThreads * kRows;
      const char* k = fresh(static_cast<const char*>(p_.k) + chunk.head * p_.k_head + column * 16);
      const char* v = fresh(static_cast<const char*>(p_.v) + chunk.head * p_.v_head + column * 16);
      const uint32_t to = shared_address(stage(warp_id(), number)) + panel_offset(first, column, S::kPanel);
      if (kRowCopies == kRowThreads && kVRowCopies == kRowThreads && chunk.tokens == kChunkTokens) {
        const auto copy_rows = [&](auto... policy) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i), place = next_row(to, i);
            copy16(place, k + uint64_t(slot) * p_.k_slot, policy...);
            copy16(place + S::kTile, v + uint64_t(slot) * p_.v_slot, policy...);
          }
        };
        // No cache policy where none is needed: even the default one takes time. Drafts' tiles of 16 rows have none: the code of both, for which small
        // batches wait, took 1 % (benchmarks/NOTES.md, "Verify steps").
        if (!(Variant::kMasks && kM > kSingleM) && items_.parts_stay())
          copy_rows(leaves_first());
        else
          copy_rows();
      } else {
        const bool in_k = column < kRowCopies, in_v = column < kVRowCopies;
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i), place = next_row(to, i);
          const bool valid = first + i < chunk.tokens;
          // V must be zero behind the end, where its weight is: what lies there may be NaN. K's scores are masked.
          if (in_k && valid) copy16(place, k + uint64_t(slot) * p_.k_slot);
          if (in_v) copy16_or_zero(place + S::kTile, v + (valid ? uint64_t(slot) * p_.v_slot : 0), valid);
        }
      }
      number = next_stage(number);
    }
    commit_copies();
    read_slots(reader);
  }

  int user_ = 0;  // with Variant::kMasks, the item that NarrowWarp computes
  Chunk ahead_[kSlotsAhead];
};

}  // namespace pat
