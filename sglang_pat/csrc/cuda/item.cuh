// A work item of one KV head as it lies in shared memory, and the map from the rows of its query tile to queries and heads.
// assign.cuh fills it from the plan; producers and consumers read it. Row r of a tile is head r % group of query r / group,
// or with tails, head r % 64 of query r / 64.
#pragma once

#include <type_traits>

#include "params.cuh"
#include "threads.cuh"

namespace pat {

// Kinds of work items, by the rows of the query tile: 8, 16, more. Narrow ones of both sizes have teams and barriers of
// their own.
enum ItemKind { kSingle, kNarrow, kWide, kItemKinds, kNoItem };

__device__ constexpr ItemKind kind_of(int m) {
  if (Variant::kLatent) return kWide;  // all warps compute every item together
  return m == kSingleM ? kSingle : m == kNarrowM ? kNarrow : kWide;
}

// Where two queries' tails are, for the producers of 8-bit KV, which run ahead of Q and so cannot read it there
// (`WideQueries`): their lengths, and where in req_to_token the second begins. The first follows the shared KV.
struct LookedUpTails {
  int64_t second_tail;
  int tail_tokens[2];
};
struct NoTails {};
constexpr bool kLooksUpTails = Variant::kTails && kHas8BitKv;

// A KV head; with limits, also how many of an item's first tokens nobody sees, as they are in front of all of its windows
// (`Items::align`). Items of 40 bytes would take two of the ring's stages; with Variant::kStraddles, where there is
// one KV head, `first_row_of` is there.
struct KvHead {
  int16_t head;
};
struct KvHeadAndHidden {
  uint16_t head : 10, hidden : 6;
};
constexpr int kMostKvHeads = Variant::kLimits ? 1 << 10 : 1 << 15;

// A work item of one KV head.
struct Item : std::conditional_t<kLooksUpTails, LookedUpTails, NoTails> {
  int64_t slots;  // index in req_to_token of its first KV slot
  int tokens;
  int first;      // of the plan's lists of queries and of parts' slots
  int query;      // batch position of the first
  int target;     // workspace slot of the first query's part, or kDirect
  uint8_t count;  // queries
  uint8_t draft
      : 7;  // with Variant::kMasks, how many of the last tokens are of its query's draft; with tails, of each tail's
  uint8_t tails : 1;  // queries continue with their tails; then each has the 64 rows of one warpgroup
  std::conditional_t<Variant::kLimits, KvHeadAndHidden, KvHead> kv;
  uint16_t first_head;  // first query head
  uint8_t m;            // rows of its query tile
  uint8_t kind;         // kItemKinds if the module has no such tile
};

// Batch position of an item's `member`-th query; the first one was looked up with the item.
__device__ __forceinline__ int query_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.query : p.section(kQueries)[item.first + member];
}

// The first of its first query's rows that an item computes.
__device__ __forceinline__ int first_row_of(const Item& item) { return Variant::kStraddles ? item.kv.head : 0; }

// The query (a `member` of the item) and head of a row of the query tile; member == item.count for rows that only pad.
struct RowQuery {
  int member, head;

  __device__ __forceinline__ RowQuery(const Params& p, const Item& item, int row)
      : member(p.query_of(row)), head(p.head_of(row)) {
    if constexpr (Variant::kTails) {
      if (item.tails) member = row / kWarpgroupRows, head = row % kWarpgroupRows;
      if (head >= p.group) member = item.count;
    }
  }
  __device__ __forceinline__ bool used(const Item& item) const { return member < item.count; }
};

// Workspace slot of a member's part, or kDirect.
__device__ __forceinline__ int target_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.target : p.section(kSlots)[item.first + member];
}

// Offset of a row of Q in units of 16 bytes; kNoSource for rows that only pad.
constexpr uint32_t kNoSource = ~0u;
template <typename T>
constexpr int kSourceElements = 16 / int(sizeof(T));
template <typename T>
__device__ __forceinline__ uint32_t source_of(const Params& p, const TokenHead& at) {
  return uint32_t((at.token * p.q_token + at.head * p.q_head) / kSourceElements<T>);
}
// Of its rope, with Variant::kLatent.
template <typename T>
__device__ __forceinline__ uint32_t rope_source_of(const Params& p, const TokenHead& at) {
  return uint32_t((at.token * p.rope_token + at.head * p.rope_head) / kSourceElements<T>);
}

// The row of Q for a row of the tile that belongs to `query`.
template <typename T>
__device__ __forceinline__ const T* q_row(const Params& p, const Item& item, int query, int row) {
  const TokenHead at = p.token_head(query, item.first_head + p.head_of(row));
  return static_cast<const T*>(p.q) + at.token * p.q_token + at.head * p.q_head;
}

}  // namespace pat
