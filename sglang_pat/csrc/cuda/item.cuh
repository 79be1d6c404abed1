// A work item of one KV head, and which queries its tile's rows are.
#pragma once

#include <type_traits>

#include "params.cuh"
#include "threads.cuh"

namespace pat {

// The phases of the forward kernel, each with the items of its tiles.
enum Phase { kSingle, kNarrow, kWide, kPhases, kNoItem };

__device__ constexpr Phase phase_of(int m) { return m == kSingleM ? kSingle : m == kNarrowM ? kNarrow : kWide; }

// Two queries' tails, where those who bring KV go on to the next items before Q of this one is there: how long they are, and where in req_to_token the
// second one begins; the first one is behind what they share.
struct LookedUpTails {
  int64_t second_tail;
  int tail_tokens[2];
};
struct NoTails {};
constexpr bool kLooksUpTails = Variant::kTails && kHas8BitKv;

// A work item of one KV head.
struct Item : std::conditional_t<kLooksUpTails, LookedUpTails, NoTails> {
  int64_t slots;  // where its first KV slot is in req_to_token
  int tokens;
  int first;      // of the plan's queries and slots
  int query;      // batch position of the first
  int target;     // where its part goes
  uint8_t count;  // queries
  uint8_t draft
      : 7;  // with Variant::kMasks, how many of the last tokens are of its query's draft; with tails, of each tail's
  uint8_t tails : 1;    // whether its queries' tails follow; then each query has a group's rows
  int16_t head;         // KV head
  uint16_t first_head;  // of its query heads
  uint8_t m;            // tile
  uint8_t phase;        // kPhases where it is for another kernel
};

// Batch position of an item's `member`-th query; the first one was looked up with the item.
__device__ __forceinline__ int query_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.query : p.section(kQueries)[item.first + member];
}

// Which query of the item a tile's row is, and which head of its group; none if `member` is the number of queries.
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

// Where its part goes.
__device__ __forceinline__ int target_of(const Params& p, const Item& item, int member) {
  return member == 0 ? item.target : p.section(kSlots)[item.first + member];
}

// Where a row of Q is, in 16 bytes; kNoSource where it is no query's.
constexpr uint32_t kNoSource = ~0u;
template <typename T>
constexpr int kSourceElements = 16 / int(sizeof(T));
template <typename T>
__device__ __forceinline__ uint32_t source_of(const Params& p, const TokenHead& at) {
  return uint32_t((at.token * p.q_token + at.head * p.q_head) / kSourceElements<T>);
}

// Q of the tile's row `row`, which is of the query `query`.
template <typename T>
__device__ __forceinline__ const T* q_row(const Params& p, const Item& item, int query, int row) {
  const TokenHead at = p.token_head(query, item.first_head + p.head_of(row));
  return static_cast<const T*>(p.q) + at.token * p.q_token + at.head * p.q_head;
}

}  // namespace pat
