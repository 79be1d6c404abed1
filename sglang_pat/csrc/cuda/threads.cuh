// The threads of a CTA, and the tiles that they compute.
#pragma once

#include "tiles.h"
#include "variant.cuh"

namespace pat {

constexpr int kWarpSize = 32, kWarpgroupThreads = 128;  // a warpgroup
constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarpSize;

// A warp has tiles of up to kNarrowM rows for itself; the others are wide, with kTokens tokens.
constexpr int kSingleM = 8;

// Q tiles come as a set of bits, m / 8 of each.
constexpr int tile_bit(int m) { return 1 << m / 8; }
constexpr int kWideTiles = ~(tile_bit(kSingleM) | tile_bit(kNarrowM));

// Warpgroups that compute. Three where they can take over registers of a fourth, which loads: so on Hopper, and up to 128
// columns, above which the accumulators of one take all there are. Elsewhere one, and two warps that load.
constexpr int warpgroups(int dim) { return dim <= 128 && Variant::kArch == 900 ? 3 : 1; }
constexpr int producer_threads(int dim) { return (warpgroups(dim) == 3 ? 4 : 2) * kWarpSize; }
constexpr int threads(int dim) { return warpgroups(dim) * kWarpgroupThreads + producer_threads(dim); }

// Of these, those that compute wide items. With KV of 8 bits the last of three converts V instead, and those that load convert K: one group of
// warps took 16.7 ns for each token (benchmarks/NOTES.md, "Drafts, mixed chunks and FP8 on an H200").
constexpr bool kHas8BitKv = Variant::kKv == kE4m3 || Variant::kKv == kE5m2;
constexpr bool two_convert(int dim) { return kHas8BitKv && warpgroups(dim) == 3; }
constexpr int wide_warpgroups(int dim) { return two_convert(dim) ? 2 : warpgroups(dim); }

}  // namespace pat
