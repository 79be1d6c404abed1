// A plan in the memory that kernels read: one int32 array, the header and then the sections one after the other without
// gaps, so that one copy moves a plan. sglang_pat/packing/layout.py says what the sections hold.
#pragma once

#include <cstdint>

namespace pat {

constexpr int32_t kOpen = -1;    // `end` of a tail: the request's length at the time
constexpr int32_t kDirect = -1;  // slot of a query with one part, which is written straight to the output

enum Header {
  kNumItems,
  kNumQueries,  // of all work items together
  kNumSlots,    // of the workspace
  kNumBins,
  kBatch,
  kBins,  // offsets of the sections; the first one's is always kHeaderSize
  kItems,
  kQueries,
  kSlots,
  kPartOffsets,
  kSize,   // ints in use
  kSteps,  // decode steps for which the plan stays good
  kHeaderSize
};

enum Column { kStart, kEnd, kFirstQuery, kItemQueries, kTileM, kTileN, kQuery, kSlot, kItemSize };

}  // namespace pat
