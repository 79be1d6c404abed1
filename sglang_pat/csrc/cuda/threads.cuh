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

constexpr bool kHas8BitKv = Variant::kKv == kFloat8_e4m3fn || Variant::kKv == kFloat8_e5m2;

// Consumer warpgroups. On Hopper three up to 128 columns; above that, where accumulators take more registers, two, or one
// with 8-bit KV, which two others convert. They take over registers of the producers. Elsewhere one, with two producer warps.
constexpr int warpgroups(int dim) {
  if (Variant::kArch != 900) return 1;
  return dim <= 128 ? 3 : kHas8BitKv ? 1 : 2;
}

// 8-bit KV of more than 128 columns, on Hopper: beside one consumer warpgroup two are producers that convert what they load
// (kv/plain_direct.cuh). With narrow items the first of them computes too.
constexpr bool converts_directly(int dim) { return kHas8BitKv && !Variant::kLatent && Variant::kArch == 900 && dim > 128; }
constexpr int narrow_warpgroups(int dim) { return converts_directly(dim) ? 2 : warpgroups(dim); }

// Producers, and those of them that fill a stage of the ring: where they convert directly, one of four sets.
constexpr int producer_threads(int dim) {
  if (converts_directly(dim)) return 2 * kWarpgroupThreads;
  return (Variant::kArch == 900 ? 4 : 2) * kWarpSize;
}
constexpr int kDirectSets = 4;
constexpr int stage_threads(int dim) { return producer_threads(dim) / (converts_directly(dim) ? kDirectSets : 1); }
constexpr int threads(int dim) { return warpgroups(dim) * kWarpgroupThreads + producer_threads(dim); }

// Registers of one of so many threads when the kernel starts, where they are traded: a multiple of eight (PTX ISA,
// `setmaxnreg`). tests/test_cuda_build.py checks that nothing spills.
constexpr int first_registers(int threads) { return 65536 / threads / 8 * 8; }

// Of these, the ones that compute wide items. With 8-bit KV the last of three converts V and the producer converts K: a
// single converting warpgroup took 16.7 ns a token (benchmarks/notes/fp8-kv.md, "Drafts over FP8 with one such group").
constexpr bool two_convert(int dim) { return kHas8BitKv && warpgroups(dim) == 3; }
constexpr int wide_warpgroups(int dim) { return two_convert(dim) ? 2 : warpgroups(dim); }

// Whether each of them has a buffer of Q for itself (`OwnQueries` in ring.cuh), as two have where all of them compute. For
// more of Q there is no room; and as KV of so many columns takes longer to arrive than 64 rows take one of them to compute,
// they need not share those.
constexpr bool has_own_queries(int dim) { return warpgroups(dim) == 2; }

}  // namespace pat
