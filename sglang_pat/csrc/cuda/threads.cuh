// Roles of a CTA's threads. Consumer warpgroups come first: they compute wide items together, and their warps compute
// narrow items one by one. Producer warps come last and fill the ring buffer of wide items (ring.cuh).
#pragma once

#include "tiles.h"
#include "variant.cuh"

namespace pat {

constexpr int kWarpSize = 32, kWarpgroupThreads = 128;  // a warpgroup
constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarpSize;

// Query tiles of up to kNarrowM rows are narrow, one warp's; larger ones are wide, with KV tiles of kTokens tokens.
constexpr int kSingleM = 8;

// A set of query tiles is a bit mask, bit m / 8 for m rows.
constexpr int tile_bit(int m) { return 1 << m / 8; }
constexpr int kWideTiles = ~(tile_bit(kSingleM) | tile_bit(kNarrowM));

// Consumer warpgroups. Three on Hopper up to 128 columns, where they take over registers of the producer warpgroup; above
// 128 columns the accumulators of one take all registers. Elsewhere one, with two producer warps.
constexpr int warpgroups(int dim) { return dim <= 128 && Variant::kArch == 900 ? 3 : 1; }
constexpr int producer_threads(int dim) { return (warpgroups(dim) == 3 ? 4 : 2) * kWarpSize; }
constexpr int threads(int dim) { return warpgroups(dim) * kWarpgroupThreads + producer_threads(dim); }

// Of these, the ones that compute wide items. With 8-bit KV the last of three converts V and the producer converts K: a
// single converting warpgroup took 16.7 ns a token (benchmarks/notes/fp8-kv.md, "Drafts over FP8 with one such group").
constexpr bool kHas8BitKv = Variant::kKv == kE4m3 || Variant::kKv == kE5m2;
constexpr bool two_convert(int dim) { return kHas8BitKv && warpgroups(dim) == 3; }
constexpr int wide_warpgroups(int dim) { return two_convert(dim) ? 2 : warpgroups(dim); }

}  // namespace pat
