// Written by `python tests/headers.py`: change it there.
#pragma once

#include <cstdint>

namespace pat {

constexpr int32_t kOpen = -1;
constexpr int32_t kDirect = -1;
constexpr int32_t kAllRows = 2147418112;

constexpr int kFirstRowShift = 8;
constexpr int kPartEndShift = 16;

enum Header {
  kNumItems,
  kNumQueries,
  kNumSlots,
  kNumBins,
  kBatch,
  kBins,
  kItems,
  kQueries,
  kSlots,
  kPartOffsets,
  kSize,
  kSteps,
  kNarrowFirst,
  kHeaderSize,
};

enum Column { kStart, kEnd, kFirstQuery, kItemQueries, kTileM, kQuery, kSlot, kTails, kItemSize };

}  // namespace pat
