// Written by `python tests/headers.py`: change it there.
#pragma once

#include <cstdint>

namespace pat {

constexpr int kTokens = 64;
constexpr int kStepTokens = 16;
constexpr int kNarrowM = 16;
constexpr int kWarpgroupRows = 64;

}  // namespace pat
