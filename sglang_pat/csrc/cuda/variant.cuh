// The module that is compiled: a dtype, format of KV, head dimension, architecture, set of tiles and what its layers ask for. The only file here that reads
// what the build defines (`Variant` in sglang_pat/kernels/cuda.py).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pat {

enum KvName { kSame, kE4m3, kE5m2, kInt4, kInt2 };

struct Variant {
  using Element = PAT_TYPE;  // of Q and outputs
  static constexpr KvName kKv = PAT_KV;
  static constexpr int kDim = PAT_DIM;
#ifdef PAT_V_DIM
  static constexpr int kVDim = PAT_V_DIM;  // V is narrower than K
#else
  static constexpr int kVDim = PAT_DIM;
#endif
  static constexpr int kArch = PAT_ARCH;               // 900 of Hopper
  static constexpr int kQueryTiles = PAT_QUERY_TILES;  // a set of bits (`tile_bit` in threads.cuh)

  // Whether heads have sinks. Asked of each row at run time, it cost 2 % (benchmarks/NOTES.md, 2026-11-23).
  static constexpr bool kSinks = PAT_SINKS;
  // Whether scores are capped. The code for it is 7 KB that would lie among what every batch runs (benchmarks/NOTES.md, "Where code lies in memory").
  static constexpr bool kCaps = PAT_CAPS;
  // Whether queries are drafts of several tokens, each of which sees some of its draft.
  static constexpr bool kMasks = PAT_MASKS;
  // Whether rows of an item see different stretches of its KV: each what is in front of its own token's end, and of that one's window.
  static constexpr bool kLimits = PAT_LIMITS;
  // Whether a wide item may go on with each query's own KV behind what they share: its tail, which a group of warps computes for itself.
  static constexpr bool kTails = PAT_TAILS;
};

}  // namespace pat
