// What the kernels are called with, and the sizes that follow from head dimension and architecture.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "../packing/layout.h"
#include "teams.h"
#include "tiles.h"

namespace pat {

constexpr int kWarpSize = 32, kGroupThreads = 128;  // a warpgroup
constexpr int kGroupWarps = kGroupThreads / kWarpSize;

// Whether heads have sinks. Asked of each row at run time, it cost 2 % (benchmarks/NOTES.md, 2026-11-23).
constexpr bool kSinks = PAT_SINKS;

// Whether queries are drafts of several tokens, each of which sees some of its draft.
constexpr bool kMasks = PAT_MASKS;
constexpr int kMostDraft = 64;  // tokens of a draft: bits of a mask

// Whether rows of an item see different stretches of its KV: each what is in front of its own token's end, and of that one's window.
constexpr bool kLimits = PAT_LIMITS;
constexpr int kNoWindow = 1 << 30;  // tokens: more than any context has

struct TokenHead {
  int token, head;
};

// Strides of Q and req_to_token are in elements, of K and V in bytes.
struct Params {
  const void *q, *k, *v;        // [tokens, token_heads, dim], [slots, kv_heads, dim], [slots, kv_heads, v_dim]
  void* out;                    // [tokens, token_heads, v_dim]
  __half* partial;              // [workspace slots, heads, v_dim]
  float* lse2;                  // [workspace slots, heads], to base 2
  const int32_t* req_to_token;  // [requests, context]
  const int64_t *rows, *seq_lens;
  const int32_t* plan;
  int64_t q_token, q_head, table_row;
  uint32_t k_slot, k_head, v_slot, v_head;
  // A query is one token and its heads; where kMasks, a draft of `draft` tokens, which lie one behind the other in Q and the output, and
  // its heads are those of each KV head for each token: [kv_heads, draft, token_group].
  int queries, heads;
  // Work items run once for each of `runs` groups of query heads: those of a KV head, in `splits` parts where they are more than a
  // tile has rows. A part has `group` heads; the last one has some of the one before again, which computes the same.
  int runs, splits, group, kv_group;
  // A query of more heads than a narrow tile has rows may be an item of that tile: then it is looked up as so many of them, each with
  // some heads, the last one likewise.
  int row_parts;
  uint32_t group_inverse;
  float scale_log2;            // weights are 2 to the power of scores times this
  float v_scale;               // V is what its bytes say times this
  float cap, cap_exponent;     // before, scores become cap tanh(score / cap) = cap - 2 cap / (1 + 2^(score cap_exponent))
  const __nv_bfloat16* sinks;  // [heads], logits without values, where kSinks
  // Where kMasks: bit j of masks[queries, draft] says that the token sees token j of its draft, the request's last `draft` tokens.
  const uint64_t* masks;
  int draft, token_heads, token_group;
  int window;  // where kLimits: tokens that one of Q sees, itself included

  // A query's head as row of heads in Q and the output.
  __device__ __forceinline__ TokenHead token_head(int query, int head) const {
    if constexpr (!kMasks) return {query, head};
    const int kv_head = quotient(head, kv_group), rest = head - kv_head * kv_group, token = quotient(rest, token_group);
    return {query * draft + token, kv_head * token_group + rest - token * token_group};
  }
  __device__ __forceinline__ int output_row(int query, int head) const {
    const TokenHead at = token_head(query, head);
    return at.token * (kMasks ? token_heads : heads) + at.head;
  }

  // To base 2, of a head of `token_heads`.
  __device__ float sink(int head) const { return __bfloat162float(sinks[head]) * 1.44269504f; }

  __device__ const int32_t* section(Header name) const { return plan + plan[name]; }

  // A tile's row as query of the item and as head of the group. Exact for the rows and groups that there are.
  __device__ int query_of(int row) const { return int(row * group_inverse >> 16); }
  __device__ int head_of(int row) const { return row - query_of(row) * group; }
};

// K and V lie in shared memory in panels of 64 columns of 16 bits: rows of 128 bytes whose 16-byte chunks are permuted by the row's
// lowest three bits. Both ldmatrix and wgmma read that without bank conflicts.
constexpr int kPanelColumns = 64, kPanelRow = 128;

__device__ __forceinline__ uint32_t panel_offset(int row, int chunk, int panel_bytes) {
  return (chunk >> 3) * panel_bytes + row * kPanelRow + (((chunk ^ row) & 7) << 4);
}

// Where the chunk 2 `step` columns further is, `step` steps of a matrix product of 16 columns on.
__device__ __forceinline__ uint32_t next_step(uint32_t offset, int step, int panel_bytes) {
  return (offset ^ (step % 4 << 5)) + step / 4 * panel_bytes;
}

// Where the same chunk is `row` rows further on. The offset's own row must be a multiple of eight, or of the power of two
// that `row` stays below.
__device__ __forceinline__ uint32_t next_row(uint32_t offset, int row) {
  return (offset ^ (row % 8 << 4)) + row * kPanelRow;
}

constexpr int panels(int dim) { return (dim + kPanelColumns - 1) / kPanelColumns; }
constexpr int row_panels(int row_bytes) { return (row_bytes + kPanelRow - 1) / kPanelRow; }

// Named barriers; 0 is __syncthreads.
constexpr int kWideBarrier = 1, kTurnBarrier = 2, kProducerBarrier = 3;
constexpr int kTeamBarrier = 4, kMostTeams = 6;  // of the first team, for each of two phases

// A warp has tiles of up to kNarrowM rows for itself; the others are wide, with kTokens tokens.
constexpr int kSingleM = 8;
constexpr int kStepTokens = 16;  // of a matrix product's step

// Q tiles come as a set of bits, m / 8 of each.
constexpr int tile_bit(int m) { return 1 << m / 8; }
constexpr int kWideTiles = ~(tile_bit(kSingleM) | tile_bit(kNarrowM));

// The most shared memory that a CTA may have (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr int kSharedLimit = (PAT_ARCH == 900 || PAT_ARCH == 1000 ? 227 : PAT_ARCH == 800 ? 163 : 99) << 10;

// Warpgroups that compute. Three where they can take over registers of a fourth, which loads: so on Hopper, and up to 128
// columns, above which the accumulators of one take all there are. Elsewhere one, and two warps that load.
constexpr int groups(int dim) { return dim <= 128 && PAT_ARCH == 900 ? 3 : 1; }
constexpr int producer_threads(int dim) { return (groups(dim) == 3 ? 4 : 2) * kWarpSize; }
constexpr int threads(int dim) { return groups(dim) * kGroupThreads + producer_threads(dim); }

// Chunks of a narrow item in shared memory for each warp.
constexpr int kNarrowStages = 2;

// 16-byte copies: a thread copies one chunk of each of several rows. Chunks that are no power of two leave some idle.
constexpr int kCopyBytes = 16;
constexpr int row_threads(int row_bytes) {
  int threads = 4;
  while (threads * kCopyBytes < row_bytes) threads *= 2;
  return threads;
}

}  // namespace pat
