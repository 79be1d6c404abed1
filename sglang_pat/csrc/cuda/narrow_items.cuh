// Which items of up to 16 rows a warp computes, chunk after chunk, and where it keeps what it reads: its own items, and its share of its team's.
#pragma once

#include "assign.cuh"
#include "smem.cuh"

namespace pat {

// Of warps that share an item.
template <int kWarps>
struct NarrowStatistics {
  float row_max[kWarps][kNarrowM], sum[kWarps][kNarrowM];
  int stage[kWarps];  // where each left its results
};

// A warp has `kStages` stages of `kStage` bytes, and takes `kChunkTokens` tokens at a time. The CTA has `kThreads`.
template <int kThreads, int kM, int kWarps, int kStages, int kStage, int kChunkTokens>
class NarrowItems {
 protected:
  using WorkItems = Items<kThreads>;
  static constexpr Phase kPhase = phase_of(kM);

  // Position in a warp's chunks: all of its own items', and its share of its team's.
  struct Cursor {
    int at = -1;   // the item
    int left = 0;  // tokens of the item from the chunk's first one on; none or fewer where a team leaves the warp nothing
    int step = 0;  // tokens to this warp's next chunk

    __device__ bool last() const { return left <= step; }
  };

  __device__ NarrowItems(const Params& p, const WorkItems& items, uint8_t* memory, NarrowStatistics<kWarps>& statistics)
      : p_(p),
        items_(items),
        memory_(memory),
        statistics_(statistics),
        count_(items.count(kPhase)),
        shared_(items.shared(kPhase)) {}

  // Where a stage of a warp is.
  __device__ uint8_t* stage(int warp, int number) const { return memory_ + warp * kStages * kStage + number * kStage; }
  __device__ static int next_stage(int number) { return number == kStages - 1 ? 0 : number + 1; }

  __device__ bool ended(const Cursor& cursor) const { return cursor.at >= count_; }
  __device__ const Item& item(const Cursor& cursor) const { return items_.get(kPhase, cursor.at); }
  __device__ static bool shared(const Cursor& cursor) { return cursor.step > kChunkTokens; }

  // Moves on to the next item that is this warp's or its team's.
  __device__ void next_item(Cursor& cursor) const {
    const TeamPlace place = items_.place(kPhase);
    const int next = cursor.at < 0 ? place.team : cursor.at + place.teams;
    const bool shared = cursor.at < shared_ && next < shared_;
    cursor.at = shared ? next : cursor.at < shared_ ? shared_ + warp_id() : cursor.at + kWarps;
    if (ended(cursor)) return;
    cursor.left = item(cursor).tokens - (shared ? place.warp * kChunkTokens : 0);
    cursor.step = shared ? place.warps * kChunkTokens : kChunkTokens;
  }

  const Params& p_;
  const WorkItems& items_;
  uint8_t* const memory_;
  NarrowStatistics<kWarps>& statistics_;
  const int count_, shared_;  // items, and the first of them that teams share
};

}  // namespace pat
