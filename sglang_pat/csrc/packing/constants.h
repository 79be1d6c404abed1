// Written by `python tests/headers.py`: change it there.
#pragma once

#include <cstdint>

namespace pat {

enum class Policy { kQuery, kNaive, kPat, kOptimal };

constexpr int64_t kMaxWaves = 8;
constexpr int64_t kSlack = 64;
constexpr int64_t kPasses = 6;
constexpr int64_t kTooLong = 8;
constexpr int64_t kSplitGain = 16;
constexpr int64_t kUneven = 32;
constexpr int64_t kLeastSteps = 8;
constexpr int64_t kTailGrowth = 2;
constexpr int64_t kTailsShare = 4;
constexpr int64_t kTailsItems = 2;
constexpr int64_t kLittlePercent = 50;
constexpr int64_t kRagged = 4;
constexpr int64_t kMaxWindow = 1073741824;

constexpr int kMaxDepth = 1024;
constexpr int kMaxSegment = 32;

constexpr double kBusyWorkers = 0.7;

constexpr int32_t kLevels[] = {512, 256, 128, 64, 32, 14, 6, 2, 0};

}  // namespace pat
