// Checks of the plan, rows, lengths, masks and slots that the CPU executor is given (attention.cpp), before any of them is
// used as an index. A wrong plan is an error, never an access out of bounds. Each `*_problem` returns what is wrong, or
// null.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstdint>

#include "../error.h"
#include "../packing/layout.h"

namespace pat {

constexpr int64_t kMostTokens = 64;  // bits of a mask
// Real work items have up to some thousand rows. Larger ones would only waste scratch memory; up to here an offset in it has 31 bits.
constexpr int32_t kMostTileRows = 1 << 14, kMostDims = 1 << 14;
constexpr int64_t kMostTailTokens = 1 << 30;  // so that a token's index fits 32 bits

// Sizes of what a plan's indices point into. `group`: query heads of a KV head.
struct Bounds {
  int64_t plan_size, batch, table_rows, table_columns, workspace_slots, group;
};

// The position that a span's bound means in a request of `tokens` tokens (packing/plan.py, `position`).
inline int32_t position(int64_t bound, int64_t tokens) {
  return int32_t(bound >= 0 ? bound : std::max<int64_t>(0, tokens + bound - kOpen));
}

inline bool within(int64_t begin, int64_t count, int64_t size) { return begin >= 0 && count >= 0 && begin + count <= size; }

// Checks a plan (packing/layout.py has its sections).
inline const char* plan_problem(const int32_t* plan, const Bounds& bounds) {
  if (bounds.plan_size < kHeaderSize) return "the plan is shorter than its header";
  const int64_t items = plan[kNumItems], queries = plan[kNumQueries], slots = plan[kNumSlots], bins = plan[kNumBins];
  if (plan[kBatch] != bounds.batch) return "the plan is not for this batch";
  if (slots < 0 || slots > bounds.workspace_slots) return "the plan needs another workspace";
  if (!within(plan[kBins], bins + 1, bounds.plan_size) || !within(plan[kItems], items * kItemSize, bounds.plan_size) ||
      !within(plan[kQueries], queries, bounds.plan_size) || !within(plan[kSlots], queries, bounds.plan_size) ||
      !within(plan[kPartOffsets], bounds.batch + 1, bounds.plan_size))
    return "the plan's sections do not lie in it";
  const int32_t *offsets = plan + plan[kPartOffsets], *query = plan + plan[kQueries], *slot = plan + plan[kSlots];
  for (int64_t i = 0; i <= bounds.batch; ++i)
    if (offsets[i] < (i ? offsets[i - 1] : 0) || offsets[i] > slots) return "the plan's parts do not lie in its workspace";
  for (int64_t i = 0; i < queries; ++i)
    if (query[i] < 0 || query[i] >= bounds.batch || slot[i] < kDirect || slot[i] >= slots)
      return "the plan has a query or a slot that there is not";
  for (int64_t i = 0; i < items; ++i) {
    const int32_t* item = plan + plan[kItems] + i * kItemSize;
    if (item[kItemQueries] < 1 || !within(item[kFirstQuery], item[kItemQueries], queries))
      return "the plan has a work item of queries that there are not";
    if (item[kItemQueries] * bounds.group > kMostTileRows) return "the plan has a work item of too many rows";
    if (item[kTails] != 0) return "the plan has a work item with tails, which only GPUs run";
    if (item[kStart] > bounds.table_columns || item[kEnd] > bounds.table_columns)
      return "the plan has a work item outside the context";
    if (item[kItemQueries] > 1 && (item[kStart] < 0 || item[kEnd] < kOpen))
      return "the plan has a work item that counts from the ends of several queries";
  }
  return nullptr;
}

// Checks rows and lengths of a batch.
inline const char* batch_problem(const int64_t* rows, const int64_t* lengths, const Bounds& bounds) {
  for (int64_t i = 0; i < bounds.batch; ++i) {
    if (rows[i] < 0 || rows[i] >= bounds.table_rows) return "a row is none of req_to_token's";
    if (lengths[i] < 0 || lengths[i] > bounds.table_columns) return "a length is not within the context";
  }
  return nullptr;
}

// Checks work items of several queries that are open at the end: the queries have to be of one request, the first one its
// longest.
inline const char* open_problem(const int32_t* plan, const int64_t* rows, const int64_t* lengths) {
  for (int64_t i = 0; i < plan[kNumItems]; ++i) {
    const int32_t* item = plan + plan[kItems] + i * kItemSize;
    if (item[kEnd] != kOpen) continue;
    const int32_t* query = plan + plan[kQueries] + item[kFirstQuery];
    for (int32_t j = 1; j < item[kItemQueries]; ++j)
      if (rows[query[j]] != rows[*query] || lengths[query[j]] > lengths[*query])
        return "the plan has an open work item whose queries are not those of its first one's request up to that one";
  }
  return nullptr;
}

// Checks the masks of a batch whose queries are several tokens each.
inline const char* masks_problem(const int64_t* lengths, const tvm::ffi::TensorView& masks, int64_t batch, int64_t group) {
  const int64_t tokens = masks.size(1);
  if (tokens > kMostTokens) return "a query has 64 tokens at most";
  if (masks.size(0) != batch || !masks.is_contiguous()) return "masks must be the batch's, and contiguous";
  if (group % tokens != 0) return "the heads of a KV head are not those of so many tokens";
  for (int64_t i = 0; i < batch; ++i)
    if (lengths[i] < tokens) return "a request is shorter than its new tokens";
  return nullptr;
}

// Checks the KV slots of a work item.
inline void check_kv_slots(const int32_t* slots, int64_t count, int64_t pool) {
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= slots[i] >= 0 && slots[i] < pool;
  TVM_FFI_CHECK(good, ValueError) << "req_to_token has a slot that the KV pool has not";
}

}  // namespace pat
