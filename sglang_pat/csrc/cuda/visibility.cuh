// Which tokens of an item a row of its query tile sees: all, with two exceptions. With Variant::kMasks a draft's mask says
// which tokens of the draft it sees. With Variant::kLimits it sees only tokens before its own end and within its window.
// softmax.cuh hides the rest.
#pragma once

#include <climits>

#include "item.cuh"

namespace pat {

// The row's draft mask; all ones for rows that only pad.
__device__ __forceinline__ uint64_t mask_of(const Params& p, const Item& item, int row) {
  if (row >= item.count * p.group) return ~0ull;
  return p.masks[p.token_head(query_of(p, item, p.query_of(row)), item.first_head + p.head_of(row)).token];
}

// Bit i: whether the mask hides the token `at` + i of the draft.
__device__ __forceinline__ uint64_t hidden_from(uint64_t mask, int at) {
  if (at >= kMostDraft || at <= -kMostDraft) return 0;
  return at >= 0 ? ~mask >> at : ~mask << -at;
}

// The end of the item's KV, as a position in its requests.
__device__ __forceinline__ int64_t end_of(const Params& p, const Item& item) {
  return item.slots + item.tokens - p.rows[item.query] * p.table_row;
}

// With Variant::kLimits: how many of the item's last tokens the row does not see because they follow its own token, which
// belongs to `query`. Negative if the item ends before that token. In a draft, a token ends at the draft's first position
// plus the number of draft tokens that it sees.
__device__ __forceinline__ int tokens_behind(const Params& p, const Item& item, int row, int query) {
  int64_t end = p.seq_lens[query];
  if constexpr (Variant::kMasks) {
    const int token = p.token_head(query, item.first_head + p.head_of(row)).token;
    end += __popcll(p.masks[token]) - p.draft;
  }
  return int(end_of(p, item) - end);
}

// The tokens [first, end) that a row sees of a KV tile, from whose first token on the item has `valid` left. In a draft
// masks hide what follows the end, so only the window is left to apply.
struct Limits {
  int first, end;

  __device__ __forceinline__ Limits(int valid, int behind, const Params& p)
      : first(valid - behind - p.window), end(Variant::kMasks ? INT_MAX : valid - behind) {}
  // Whether one of the first `tokens` is hidden.
  __device__ __forceinline__ bool hide_some(int tokens) const { return first > 0 || end < tokens; }
  __device__ __forceinline__ bool hide(int token) const { return token < first || token >= end; }
};

}  // namespace pat
