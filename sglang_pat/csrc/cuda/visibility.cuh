// What a row sees of an item: all of it, but of its own draft what the draft's mask says.
#pragma once

#include "item.cuh"

namespace pat {

// How many of an item's last tokens are of its request's draft: more than it has where it begins within, none or less where it ends
// in front.
__device__ __forceinline__ int draft_tokens(const Params& p, const Item& item) {
  const int64_t end = item.slots + item.tokens - p.rows[item.query] * p.table_row;
  return int(end - (p.seq_lens[item.query] - p.draft));
}

// Which tokens of the draft the tile's row sees; all where it is no query's.
__device__ __forceinline__ uint64_t mask_of(const Params& p, const Item& item, int row) {
  if (row >= item.count * p.group) return ~0ull;
  return p.masks[p.token_head(query_of(p, item, p.query_of(row)), item.first_head + p.head_of(row)).token];
}

// Whether a row's mask hides what is `at` tokens behind the first one of its draft.
__device__ __forceinline__ bool hides(uint64_t mask, int at) { return at >= 0 && at < kMostDraft && !(mask >> at & 1); }

}  // namespace pat
