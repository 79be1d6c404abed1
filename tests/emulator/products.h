// What warps compute together. None of it depends on a module's variant: it is compiled once, for all modules (emulated.py).
#pragma once

#include <array>

#include "machine.h"

namespace emulator {

struct MmaIn {
  float d[4];
  uint32_t a[4], b[2];
};
using Sums = std::array<float, 4>;

// A warp's product of 16 x 16 and 16 x 8; `numbers` says what all 16 bits mean.
void multiply(const MmaIn (&in)[kWarpSize], Sums (&out)[kWarpSize], const float* numbers);

// Carries out this warp's groups of products, but for the last `pending` that are committed and the one that is not.
void finish_groups(int pending);

}  // namespace emulator
