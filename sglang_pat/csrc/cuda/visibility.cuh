// What a row sees of an item: all tokens, with two exceptions. With Variant::kMasks, its draft's mask says which tokens of the draft it sees. With
// Variant::kLimits, it sees only tokens before its own end and within its window.
#pragma once

#include <climits>

#include "item.cuh"

namespace pat {

// Which tokens of the draft the tile's row sees; all where it is no query's.
__device__ __forceinline__ uint64_t mask_of(const Params& p, const Item& item, int row) {
  if (row >= item.count * p.group) return ~0ull;
  return p.masks[p.token_head(query_of(p, item, p.query_of(row)), item.first_head + p.head_of(row)).token];
}

// Bit i says whether a row's mask hides what is `at` + i tokens behind the first one of its draft.
__device__ __forceinline__ uint64_t hidden_from(uint64_t mask, int at) {
  if (at >= kMostDraft || at <= -kMostDraft) return 0;
  return at >= 0 ? ~mask >> at : ~mask << -at;
}

// Where the item ends in its requests.
__device__ __forceinline__ int64_t end_of(const Params& p, const Item& item) {
  return item.slots + item.tokens - p.rows[item.query] * p.table_row;
}

// For Variant::kLimits: how many of the item's last tokens lie behind the end of the row's own token, which belongs to `query`. Negative if the item
// ends before that. In a draft, a token's end is the first of the draft plus the number of the draft's tokens that it sees.
__device__ __forceinline__ int tokens_behind(const Params& p, const Item& item, int row, int query) {
  int64_t end = p.seq_lens[query];
  if constexpr (Variant::kMasks) {
    const int token = p.token_head(query, item.first_head + p.head_of(row)).token;
    end += __popcll(p.masks[token]) - p.draft;
  }
  return int(end_of(p, item) - end);
}

// A row sees tokens `[first, end)` of a tile from whose first token on the item has `valid` left; `behind` is its `tokens_behind`. In a
// draft, masks hide what is behind the end, so that only the window is left to do here.
struct Limits {
  int first, end;

  __device__ __forceinline__ Limits(int valid, int behind, const Params& p)
      : first(valid - behind - p.window), end(Variant::kMasks ? INT_MAX : valid - behind) {}
  // Whether any of the first `tokens` is hidden.
  __device__ __forceinline__ bool hide_some(int tokens) const { return first > 0 || end < tokens; }
  __device__ __forceinline__ bool hide(int token) const { return token < first || token >= end; }
};

}  // namespace pat
