// Arguments of the forward and merge kernels: module.cu fills one struct and passes it by value. Shapes stand beside the
// pointers. A head here is a query head; a draft's tokens count as more heads (`heads`).
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
  int plan_lines, length_lines;  // cache lines to prefetch, at most: of the plan, and of seq_lens and rows
  int64_t q_token, q_head, table_row;
  uint32_t k_slot, k_head, v_slot, v_head;
  // A query is one token with all its heads. With Variant::kMasks it is a draft of `draft` tokens, consecutive in Q and the
  // output, and its heads are ordered [kv_heads, draft, token_group].
  int queries, heads;
  // A work item of the plan runs once for each of `runs` sets of query heads: for each KV head, `splits` sets of `group`
  // heads. There are several where a KV head has more query heads than a tile has rows. The last set then overlaps the one
  // before, and both write the same results.
  int runs, splits, group, kv_group;
  // A narrow item may have a query with more heads than its tile has rows. It is then looked up as `row_slices` items of
  // some heads each, of which the last overlaps likewise.
  int row_slices;
  uint32_t group_inverse;
  float scale_log2;  // softmax weights are exp2(score * scale_log2)
  float v_scale;     // dequantisation scale of V
  // With Variant::kCaps: before that scale, scores become cap tanh(score / cap) = cap - 2 cap / (1 + 2^(score
  // cap_exponent)).
  float cap, cap_exponent;
  const __nv_bfloat16* sinks;  // [heads], logits without values, with Variant::kSinks
  // With Variant::kMasks: bit j of masks[queries, draft] says that the token sees token j of its draft, which is the last
  // `draft` tokens of the request.
  const uint64_t* masks;
  int draft, token_heads, token_group;
  int window;  // with Variant::kLimits: tokens that a query sees, itself included
  // With KV of 4 or 2 bits: records[pages, kv_heads, record], `page_bytes` a page (kv/page_record.cuh). k and v then hold
  // tokens behind each request's last full page: 64 slots for each row of req_to_token.
  const uint8_t* records;
  uint32_t page_bytes;
  // With Variant::kLatent: the columns of Q behind the first v_dim, [tokens, token_heads, dim - v_dim]. q then has at least
  // those first ones.
  const void* q_rope;
  int64_t rope_token, rope_head;

  // The row of Q and the output for a query and one of its `heads`, as token and head of `token_heads`.
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

  // The query of the item and the head of its set that a row of the query tile is. The multiplication by an inverse is
  // exact for all rows and groups in use.
  __device__ int query_of(int row) const { return int(row * group_inverse >> 16); }
  __device__ int head_of(int row) const { return row - query_of(row) * group; }
};

}  // namespace pat
