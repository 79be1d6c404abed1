// The narrow items of a warp, chunk by chunk: those of its own, and its share of its team's. Base class of the loaders
// (kv/plain_load.cuh, kv/page_load.cuh); also where a warp's stages lie in shared memory.
#pragma once

#include "assign.cuh"
#include "smem.cuh"

namespace pat {

// What a team needs to merge: for each warp and row, softmax maximum and sum.
template <int kWarps>
struct NarrowStatistics {
  float row_max[kWarps][kNarrowM], sum[kWarps][kNarrowM];
  int stage[kWarps];  // the stage in which each warp left its O
};

// A warp has `kStages` stages of `kStage` bytes and takes chunks of `kChunkTokens` tokens. The CTA has `kThreads` threads.
template <int kThreads, int kM, int kWarps, int kStages, int kStage, int kChunkTokens>
class NarrowItems {
 protected:
  using WorkItems = Items<kThreads>;
  static constexpr ItemKind kKind = kind_of(kM);

  // Position in the chunks of a warp.
  struct Cursor {
    int at = -1;   // the item
    int left = 0;  // tokens of the item from this chunk on; none or negative if the team leaves the warp nothing
    int step = 0;  // tokens to this warp's next chunk

    __device__ bool last() const { return left <= step; }
  };

  __device__ NarrowItems(const Params& p, const WorkItems& items, uint8_t* memory, NarrowStatistics<kWarps>& statistics)
      : p_(p),
        items_(items),
        memory_(memory),
        statistics_(statistics),
        count_(items.count(kKind)),
        shared_(items.shared(kKind)) {}

  // Address of a warp's stage.
  __device__ uint8_t* stage(int warp, int number) const { return memory_ + warp * kStages * kStage + number * kStage; }
  __device__ static int next_stage(int number) { return number == kStages - 1 ? 0 : number + 1; }

  __device__ bool ended(const Cursor& cursor) const { return cursor.at >= count_; }
  __device__ const Item& item(const Cursor& cursor) const { return items_.get(kKind, cursor.at); }
  __device__ static bool shared(const Cursor& cursor) { return cursor.step > kChunkTokens; }

  // Moves to the next item of this warp or its team.
  __device__ void next_item(Cursor& cursor) const {
    const TeamPlace place = items_.place(kKind);
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
  const int count_, shared_;  // items of the kind; the first `shared_` are teams'
};

}  // namespace pat
