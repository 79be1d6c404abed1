// The ring buffer of wide work items in shared memory, and what copies Q beside it. A stage holds K or V of one KV tile,
// [64 tokens, dim], K and V alternating; Q of an item, [rows, dim], has one or two buffers beside the ring. All lie in
// swizzled panels (smem.cuh). Every stage has a full and an empty mbarrier. The consumers are in wide.cuh; what fills the stages is
// of the KV format (kv/plain_copy.cuh, kv/plain_convert.cuh, kv/plain_direct.cuh, kv/page_convert.cuh).
#pragma once

#include "assign.cuh"
#include "kv/format.cuh"
#include "ptx.cuh"
#include "results.cuh"
#include "smem.cuh"

namespace pat {

// Up to this many tokens, an item of 64 rows is computed by one warpgroup: an item of 32 tokens took 3.9 us, 16 rows of it
// 0.5 (python -m sglang_pat.tune).
constexpr int kOwnTokens = 4 * kTokens;

// Warpgroups that share a longer item of 64 rows: they alternate over its KV tiles. Three take 1.4 % longer, because K and
// V of a third tile leave no stages for prefetch (benchmarks/notes/kernels-wide.md, "Where an item's time goes").
constexpr int kAlternating = 2;

// Whether an item is shared like that.
template <int kDim>
__device__ __forceinline__ bool alternates_tiles(const Item& item) {
  return wide_warpgroups(kDim) > 1 && !has_own_queries(kDim) && !Variant::kBatchInvariant && item.m == kWarpgroupRows &&
         item.tokens > kOwnTokens;
}

// Bytes of a stage. V is no wider than K.
template <int kDim>
constexpr int kStageBytes = panels(kDim) * kPanelBytes;

// Rows of the largest query tile: 64 for each warpgroup.
template <int kDim>
constexpr int kMaxRows = wide_warpgroups(kDim) * kWarpgroupRows;

// Rows of Q in a buffer; with `has_own_queries`, those of one warpgroup.
template <int kDim>
constexpr int kBufferRows = has_own_queries(kDim) ? kWarpgroupRows : kMaxRows<kDim>;

// Q of an item, and what consumers need of each row: where its result goes, its mask, its `tokens_behind`, and its query's
// tail. Except with `has_own_queries`, `q` has room for all consumer warpgroups, even where the last one converts instead:
// `WideWarpgroup::reduce_warpgroups` uses the rows behind the first 64 as scratch for O [64, v_dim] in float32.
template <int kDim>
struct WideQueries {
  alignas(1024) uint8_t q[(has_own_queries(kDim) ? 1 : warpgroups(kDim)) * kWarpgroupRows * panels(kDim) * kPanelRow];
  int targets[kBufferRows<kDim>];
  uint32_t sources[kBufferRows<kDim>];  // `source_of` each row
  uint64_t masks[Variant::kMasks ? kBufferRows<kDim> : 1];
  int behind[Variant::kLimits ? kBufferRows<kDim> : 1];
  int64_t tail_slots[Variant::kTails ? warpgroups(kDim) : 1];  // index in req_to_token
  int tail_tokens[Variant::kTails ? warpgroups(kDim) : 1];
};

__device__ __forceinline__ int tiles_of(int tokens) { return int(unsigned(tokens + kTokens - 1) / kTokens); }

// KV tiles of the longest tail: every query's tail takes as many places in the ring.
template <int kDim>
__device__ __forceinline__ int tail_tiles(const WideQueries<kDim>& queries, int count) {
  int longest = 0;
  for (int i = 0; i < count; ++i) longest = max(longest, queries.tail_tokens[i]);
  return tiles_of(longest);
}

// Buffers of Q: two where memory suffices. Converted KV needs the memory more
// (benchmarks/notes/fp8-kv.md, "One group of warps that converts").
constexpr int query_buffers(bool converts) { return kSharedLimit > (200 << 10) && !converts ? 2 : 1; }

// Arrivals of each warp at a stage's empty barrier if one warpgroup reads it: divisible by two and three, for stages that
// several read.
constexpr int kArrivals = Variant::kArch == 900 ? 6 : 1;

template <int kStages>
struct RingBarriers {
  alignas(8) uint64_t full[kStages], empty[kStages];
};

// Position of a producer in a ring of `kStages` stages.
template <int kStages>
class RingCursor {
 public:
  __device__ explicit RingCursor(RingBarriers<kStages>& barriers) : barriers_(barriers) {}

  __device__ int stage() const { return stage_; }
  // Returns at once in the first round: all stages begin empty.
  __device__ void wait_empty() const { wait_barrier(shared_address(&barriers_.empty[stage_]), phase_ ^ 1); }
  __device__ uint32_t full_barrier() const { return shared_address(&barriers_.full[stage_]); }
  __device__ void advance(int stages = 1) {
    stage_ += stages;
    if (stage_ >= kStages) stage_ -= kStages, phase_ ^= 1;
  }

 private:
  RingBarriers<kStages>& barriers_;
  int stage_ = 0, phase_ = 0;
};

// The two stages of a KV tile, K and V, for consumers. A wait tests only the parity of a phase: if a stage still lacked its
// tile of the round before, the wait would return too early. That cannot happen. A warpgroup waits for a tile only after it
// saw an older tile of its own, or Q, full. The same threads issued those copies after the stage's tile of the round
// before, and their copies arrive in order. Where other threads load K (`two_convert`), Q has one buffer, so all K before
// it was read. Where four sets of threads fill stages in turn (`converts_directly`), one warpgroup waits for all tiles in
// order, and each set fills its next stage behind the one before.
template <int kStages>
class TileStages {
  static_assert(kStages % 2 == 0);

 public:
  // Stages of KV tile number `tile`, counted over all that went through the ring.
  __device__ TileStages(RingBarriers<kStages>& barriers, unsigned tile)
      : barriers_(barriers), stage_(int(tile % (kStages / 2) * 2)), phase_(int(tile / (kStages / 2) % 2)) {}

  __device__ int stage(bool is_v) const { return stage_ + is_v; }
  __device__ void wait_full(bool is_v) const { wait_barrier(shared_address(&barriers_.full[stage(is_v)]), phase_); }
  // Every warp of the warpgroups that read the stage arrives here when it is done.
  __device__ uint32_t empty_barrier(bool is_v) const { return shared_address(&barriers_.empty[stage(is_v)]); }
  // The tile `tiles` further, at most one round of the ring.
  __device__ TileStages further(int tiles) const {
    TileStages next = *this;
    next.stage_ += 2 * tiles;
    if (next.stage_ >= kStages) next.stage_ -= kStages, next.phase_ ^= 1;
    return next;
  }
  __device__ void operator=(const TileStages& other) { stage_ = other.stage_, phase_ = other.phase_; }

 private:
  RingBarriers<kStages>& barriers_;
  int stage_, phase_;
};

// Position in the wide items of one look-up, whose Q goes through `kBuffers` buffers. Buffer and phase follow from the
// item's number: one register instead of three.
template <int kBuffers>
class QueryCursor {
 public:
  __device__ explicit QueryCursor(RingBarriers<kBuffers>& barriers) : barriers_(barriers) {}

  __device__ int item() const { return item_; }
  __device__ int buffer() const { return item_ % kBuffers; }
  __device__ void wait_full() const { wait_barrier(shared_address(&barriers_.full[buffer()]), phase()); }
  __device__ void wait_empty() const { wait_barrier(shared_address(&barriers_.empty[buffer()]), phase() ^ 1); }
  __device__ uint32_t full_barrier() const { return shared_address(&barriers_.full[buffer()]); }
  __device__ uint32_t empty_barrier() const { return shared_address(&barriers_.empty[buffer()]); }
  __device__ void advance() { ++item_; }

  // As `OwnQueries`, whatever the item's rows.
  __device__ int buffer(int, int) const { return buffer(); }
  __device__ static int place(int row) { return row; }
  __device__ static int rows(int m) { return m; }
  __device__ void wait_all_empty(int) const { wait_empty(); }
  template <typename Arrive>
  __device__ void fill(int, Arrive arrive_at) const {
    arrive_at(full_barrier());
  }
  __device__ void advance(int) { advance(); }

 private:
  __device__ int phase() const { return item_ / kBuffers % 2; }

  RingBarriers<kBuffers>& barriers_;
  int item_ = 0;
};

// The same where each of two warpgroups has a buffer for itself. Items of 64 rows are taken in turn, and one of 128 rows is
// a turn of both: of its rows the first 64 are the first warpgroup's, whoever's turn it would be.
class OwnQueries {
 public:
  __device__ explicit OwnQueries(RingBarriers<2>& barriers) : barriers_(barriers) {}

  __device__ int item() const { return item_; }
  // The buffer of a row of an item of `m` rows, which is the number of the warpgroup that computes the row; the row's place
  // there; and how many rows it holds.
  __device__ int buffer(int row, int m) const { return m > kWarpgroupRows ? row / kWarpgroupRows : turn_ % 2; }
  __device__ static int place(int row) { return row % kWarpgroupRows; }
  __device__ static int rows(int) { return kWarpgroupRows; }
  // Whether a warpgroup computes rows of the item.
  __device__ bool takes(int warpgroup, int m) const { return m > kWarpgroupRows || turn_ % 2 == warpgroup; }
  __device__ void wait_full(int buffer) const { wait_barrier(shared_address(&barriers_.full[buffer]), phase(buffer)); }
  __device__ uint32_t empty_barrier(int buffer) const { return shared_address(&barriers_.empty[buffer]); }
  // For the producer: waits for all buffers of the item, and runs `arrive_at` with the full barrier of each.
  __device__ void wait_all_empty(int m) const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      if (takes(buffer, m)) wait_barrier(shared_address(&barriers_.empty[buffer]), phase(buffer) ^ 1);
    }
  }
  template <typename Arrive>
  __device__ void fill(int m, Arrive arrive_at) const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      if (takes(buffer, m)) arrive_at(shared_address(&barriers_.full[buffer]));
    }
  }
  __device__ void advance(int m) { ++item_, turn_ += m / kWarpgroupRows; }

 private:
  // Of the buffer's turn that comes next.
  __device__ int phase(int buffer) const { return (turn_ + (turn_ + buffer) % 2) / 2 % 2; }

  RingBarriers<2>& barriers_;
  int item_ = 0, turn_ = 0;
};

template <int kDim, int kBuffers>
using Queries = std::conditional_t<has_own_queries(kDim), OwnQueries, QueryCursor<kBuffers>>;

template <int kStages, int kBuffers>
struct WideBarriers {
  RingBarriers<kStages> ring;
  RingBarriers<kBuffers> queries;

  // Every thread calls it; a __syncthreads has to follow. `again`: the barriers exist, and nobody uses them any more.
  template <int kDim>
  __device__ void init(bool again) {
    const int i = thread_of_cta();
    const auto init_one = [&](uint64_t& barrier, int arrivals) {
      if (again) invalidate_barrier(shared_address(&barrier));
      init_barrier(shared_address(&barrier), arrivals);
    };
    if (i < kStages) {
      init_one(ring.full[i], stage_threads(kDim));
      init_one(ring.empty[i], kArrivals * kWarpgroupWarps);
    }
    if (i < kBuffers) {
      init_one(queries.full[i], 2 * producer_threads(kDim));
      init_one(queries.empty[i], (has_own_queries(kDim) ? 1 : wide_warpgroups(kDim)) * kWarpgroupThreads);
    }
  }
};

// Copies Q of wide items to shared memory, by the producer warps. What the plan says of the next item's queries is loaded
// while this item's rows are copied.
template <typename T, typename Product, int kDim, int kBuffers, typename WorkItems = Items<threads(kDim)>>
class QueryProducer {
  static constexpr int kThreads = producer_threads(kDim);
  static constexpr int kRowThreads = row_threads(kDim * int(sizeof(T)));
  static constexpr int kRows = (kMaxRows<kDim> + kThreads - 1) / kThreads;  // rows that a thread looks up

 public:
  __device__ QueryProducer(const Params& p, const WorkItems& items, WideQueries<kDim> (&memory)[kBuffers],
                           RingBarriers<kBuffers>& barriers)
      : p_(p), items_(items), memory_(memory), queries_(barriers) {}

  // Loads queries and targets of item `i`, each thread those of some rows.
  __device__ void read(int i) {
    if (i >= items_.count(kWide)) return;
    const Item& item = items_.get(kWide, i);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = int(thread()) + j * kThreads;
      const RowQuery query(p_, item, row);
      if (query.used(item)) {
        queries_ahead_[j] = p_.section(kQueries)[item.first + query.member];
        targets_ahead_[j] = p_.section(kSlots)[item.first + query.member];
      }
    }
  }

  // Copies Q of the next item, whose queries `read` has loaded.
  __device__ void copy() {
    const Item& item = items_.get(kWide, queries_.item());
    const unsigned column = own_column();
    start(item, column);
    finish(item, column);
  }

  // The same in two steps, between which Q comes.
  __device__ void start(const Item& item, unsigned column = own_column()) {
    queries_.wait_all_empty(item.m);
    // One row a thread: with 64 rows to a draft, one thread for all rows of a query took 8 us an item.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = int(thread()) + i * kThreads;
      if (row >= item.m) continue;
      auto& to = memory_[queries_.buffer(row, item.m)];
      const int place = queries_.place(row);
      to.targets[place] = RowTarget::kNone, to.sources[place] = kNoSource;
      if constexpr (Variant::kLimits) to.behind[place] = 0;
      const RowQuery query(p_, item, row);
      if (!query.used(item)) continue;
      const int head = item.first_head + query.head;
      const TokenHead at = p_.token_head(queries_ahead_[i], head);
      to.targets[place] = RowTarget(p_, head, queries_ahead_[i], targets_ahead_[i]).code();
      to.sources[place] = source_of<T>(p_, at);
      if constexpr (Variant::kMasks) copy8(shared_address(&to.masks[place]), p_.masks + at.token);
      if constexpr (Variant::kLimits) to.behind[place] = tokens_behind(p_, item, row, queries_ahead_[i]);
      if constexpr (Variant::kTails) {
        if (item.tails && query.head == 0) {
          const int64_t begin = end_of(p_, item), row_begin = p_.rows[queries_ahead_[i]] * p_.table_row;
          to.tail_slots[query.member] = row_begin + begin;
          to.tail_tokens[query.member] = max(0, int(p_.seq_lens[queries_ahead_[i]] - begin));
        }
      }
    }
    sync_threads(kProducerBarrier, kThreads);
    if (column < kDim / 8) {
      // Several rows at a time. Their sources are loaded first: one after the other they took 160 to 210 cycles each.
      constexpr int kApart = kThreads / kRowThreads, kBatch = std::min(8, kWarpgroupRows / kApart);
      static_assert(kWarpgroupRows % (kBatch * kApart) == 0);  // a batch is in one buffer
      const int rows = item.m;
      const char* const q = fresh(static_cast<const char*>(p_.q) + column * kCopyBytes);
#pragma unroll 1
      for (int first = int(thread() / kRowThreads); first < rows; first += kBatch * kApart) {
        auto& to = memory_[queries_.buffer(first, rows)];
        const int place = queries_.place(first);
        uint32_t sources[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sources[i] = to.sources[place + i * kApart];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const bool used = sources[i] != kNoSource;
          copy16_or_zero(shared_address(to.q) + panel_offset(place + i * kApart, column, queries_.rows(rows) * kPanelRow),
                         q + uint64_t(used ? sources[i] : 0) * kCopyBytes, used);
        }
      }
    }
  }
  __device__ void finish(const Item& item, unsigned column = own_column()) {
    if constexpr (std::is_same_v<T, Product>) {
      queries_.fill(item.m, [](uint32_t full_barrier) { arrive_after_copies(full_barrier); });
    } else {
      static_assert(!has_own_queries(kDim));
      commit_copies();
      wait_copies<0>();
      if (column < kDim / 8) convert(memory_[queries_.buffer()], item.m, column);
      arrive(queries_.full_barrier());
    }
    queries_.fill(item.m, [](uint32_t full_barrier) { arrive(full_barrier); });
    queries_.advance(item.m);
  }

 private:
  __device__ static unsigned thread() { return thread_of<kThreads>(); }
  __device__ static unsigned own_column() { return thread() % kRowThreads; }

  // Converts in place what this thread has copied.
  __device__ static void convert(WideQueries<kDim>& to, int rows, unsigned column) {
#pragma unroll 2
    for (int row = int(thread() / kRowThreads); row < rows; row += kThreads / kRowThreads) {
      uint4& x = *reinterpret_cast<uint4*>(to.q + panel_offset(row, column, rows * kPanelRow));
      x = convert_pairs<T, Product>(x);
    }
  }

  const Params& p_;
  const WorkItems& items_;
  WideQueries<kDim> (&memory_)[kBuffers];
  Queries<kDim, kBuffers> queries_;
  int queries_ahead_[kRows] = {}, targets_ahead_[kRows] = {};
};

// Which rows of a KV tile, and which 16-byte chunk of them, each producer thread copies.
template <int kDim, int kRowBytes>
struct TileRows {
  static constexpr int kRowThreads = row_threads(kRowBytes);
  // A thread's rows are kStride apart. At a multiple of 8 they have the same swizzle.
  static constexpr int kStride = producer_threads(kDim) / kRowThreads, kRows = kTokens / kStride;
  static_assert(kRows <= kRowThreads);  // each lane holds the slot of one row

  __device__ static unsigned thread() { return thread_of<producer_threads(kDim)>(); }
  // The row of a tile whose slot this lane reads.
  __device__ static int own_row() { return int(thread() / kRowThreads + thread() % kRows * kStride); }
  // The lane with the slot of this thread's first row; the next lanes have those of its other rows.
  __device__ static int slot_lane() { return int(thread() % kWarpSize / kRowThreads * kRowThreads); }
};

// The row of an item's KV to copy for a row of it: where nobody sees that, its first that is seen. Its slot may be somebody
// else's by now, and hold NaN.
template <typename AnyItem>
__device__ __forceinline__ int seen_row(const AnyItem& item, int row) {
  if constexpr (Variant::kLimits) return max(row, int(item.kv.hidden));
  return row;
}

}  // namespace pat
