// What one compiled module is for: dtype, KV format, head dimensions, architecture, query tiles, and the features that its
// layers use. Every kernel reads it as compile-time constants. Only this file reads the build's macros (`Variant` in
// sglang_pat/kernels/cuda.py).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pat {

// As in packing/spec.py; kSame is Q's dtype.
enum KvName { kSame, kFloat8_e4m3fn, kFloat8_e5m2, kInt4, kInt2 };

struct Variant {
  using Element = PAT_TYPE;  // of Q and outputs
  static constexpr KvName kKv = PAT_KV;
  static constexpr int kDim = PAT_DIM;
  static constexpr int kVDim = PAT_V_DIM;
  static constexpr bool kLatent = PAT_LATENT;          // V is the first columns of K (MLA)
  static constexpr int kArch = PAT_ARCH;               // 900 of Hopper
  static constexpr int kQueryTiles = PAT_QUERY_TILES;  // a set of bits (`tile_bit` in threads.cuh)

  // Whether heads have attention sinks. A test of each row at run time took 2 %
  // (benchmarks/notes/code-placement.md, "Sinks in modules of their own").
  static constexpr bool kSinks = PAT_SINKS;
  // Whether scores are capped (tanh). A module of its own: the code is 7 KB and would lie among what every batch runs
  // (benchmarks/notes/code-placement.md, "Where code lies in memory").
  static constexpr bool kCaps = PAT_CAPS;
  // Whether a query is a draft of several tokens, with a mask for each token of which tokens of the draft it sees.
  static constexpr bool kMasks = PAT_MASKS;
  // Whether rows of a work item see different ranges of its KV, by causality or a sliding window (extends; `Limits` in
  // visibility.cuh).
  static constexpr bool kLimits = PAT_LIMITS;
  // Whether a wide item may continue with tails: behind the shared KV each warpgroup reads the KV of its own query only.
  static constexpr bool kTails = PAT_TAILS;
  // Whether a query's result has the same bits in any batch: every wide item adds up its KV in one order, as parts are merged
  // in one, and KV tiles begin where positions are multiples of 64.
  static constexpr bool kBatchInvariant = PAT_BATCH_INVARIANT;
  // Whether queries of latents may straddle work items: an item may begin within a query, and merge looks up which rows a
  // part has, which took modules that do not need it 2 to 4 % (benchmarks/notes/latents.md, "Queries that straddle tiles").
  static constexpr bool kStraddles = PAT_STRADDLES;
};

}  // namespace pat
