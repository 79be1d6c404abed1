// What the kernels are called with.
#pragma once

#include <cstdint>

#include "../packing/layout.h"
#include "teams.h"
#include "variant.cuh"

namespace pat {

constexpr int kMostDraft = 64;      // tokens of a draft: bits of a mask
constexpr int kNoWindow = 1 << 30;  // tokens: more than any context has
constexpr int kLineBytes = 128;     // of the L2 cache

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
  int plan_lines, length_lines;  // of the plan what a batch's may have, and of seq_lens and rows
  int64_t q_token, q_head, table_row;
  uint32_t k_slot, k_head, v_slot, v_head;
  // A query is one token and its heads; where Variant::kMasks, a draft of `draft` tokens, which lie one behind the other in Q and the output, and
  // its heads are those of each KV head for each token: [kv_heads, draft, token_group].
  int queries, heads;
  // Work items run once for each of `runs` groups of query heads: those of a KV head, in `splits` splits where they are more than a
  // tile has rows. A split has `group` heads; the last one has some of the one before again, which computes the same.
  int runs, splits, group, kv_group;
  // A query of more heads than a narrow tile has rows may be an item of that tile: then it is looked up as so many of them, each with
  // some heads, the last one likewise.
  int row_slices;
  uint32_t group_inverse;
  float scale_log2;  // weights are 2 to the power of scores times this
  float v_scale;     // V is what its bytes say times this
  // Where Variant::kCaps: before that scale, scores become cap tanh(score / cap) = cap - 2 cap / (1 + 2^(score cap_exponent)).
  float cap, cap_exponent;
  const __nv_bfloat16* sinks;  // [heads], logits without values, where Variant::kSinks
  // Where Variant::kMasks: bit j of masks[queries, draft] says that the token sees token j of its draft, the request's last `draft` tokens.
  const uint64_t* masks;
  int draft, token_heads, token_group;
  int window;  // where Variant::kLimits: tokens that one of Q sees, itself included
  // Where KV has few bits: [pages, kv_heads, record], `page_bytes` a page. Then k and v are tails: 64 tokens for each row of req_to_token.
  const uint8_t* records;
  uint32_t page_bytes;

  // A query's head as row of heads in Q and the output.
  __device__ __forceinline__ TokenHead token_head(int query, int head) const {
    if constexpr (!Variant::kMasks) return {query, head};
    const int kv_head = quotient(head, kv_group), rest = head - kv_head * kv_group, token = quotient(rest, token_group);
    return {query * draft + token, kv_head * token_group + rest - token * token_group};
  }
  __device__ __forceinline__ int output_row(int query, int head) const {
    const TokenHead at = token_head(query, head);
    return at.token * (Variant::kMasks ? token_heads : heads) + at.head;
  }

  // To base 2, of a head of `token_heads`.
  __device__ float sink(int head) const { return __bfloat162float(sinks[head]) * 1.44269504f; }

  __device__ const int32_t* section(Header name) const { return plan + plan[name]; }

  // A tile's row as query of the item and as head of the group. Exact for the rows and groups that there are.
  __device__ int query_of(int row) const { return int(row * group_inverse >> 16); }
  __device__ int head_of(int row) const { return row - query_of(row) * group; }
};

}  // namespace pat
