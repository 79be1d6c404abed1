// Wide work items: O = softmax(Q K^T) V of a query tile of 64, 128 or 192 rows, KV tiles of 64 tokens, by online softmax. A
// warpgroup (`WideWarpgroup`) computes 64 rows: S [64, 64] and O [64, v_dim] are in registers as softmax.cuh describes; K,
// V and Q come through the ring (ring.cuh). kv/plain.cuh and kv/page.cuh run it.
//
//   item                                       computed by
//   more than 64 rows                          several warpgroups, 64 rows each
//   64 rows, up to kOwnTokens tokens           one warpgroup, the next item by the next one: each hides the others'
//                                              latency, but not that of Q where it has one buffer (converted KV)
//   64 rows, each group with a buffer of Q     the same, whatever the tokens (`has_own_queries`)
//   64 rows, kBatchInvariant                   the same, whatever the tokens; with one buffer of Q one group waits for it
//   64 rows, more tokens                       two warpgroups, which alternate over KV tiles and merge at the end
//   with tails                                 as above; then each warpgroup continues with its own query's tail
//
// A warpgroup skips the stages that are for others.
#pragma once

#include "products.cuh"
#include "results.cuh"
#include "ring.cuh"

namespace pat {

// Registers of a thread that computes wide items and of one that loads them, where the others give theirs away.
constexpr int kLoadRegisters = 56;
template <int kDim>
constexpr int kComputeRegisters =
    (first_registers(threads(kDim)) * threads(kDim) / kWarpgroupThreads - kLoadRegisters) / warpgroups(kDim) / 8 * 8;

// Alternating warpgroups hold K and V of two tiles while a third is loaded: with four stages, 64 rows took 34 ns a token
// instead of 20 (benchmarks/notes/fp8-kv.md, "One group of warps that converts"). Two with Q of their own read the same tile,
// or one of them reads all.
template <int kDim>
constexpr int kFewestStages = 2 * warpgroups(kDim);

struct WideStatistics {
  float row_max[kWarpgroupRows], sum[kWarpgroupRows];  // of the second of two alternating warpgroups
};

template <typename T, typename Kv, int kDim, int kVDim, int kStages, typename Memory, typename WorkItems>
class WideWarpgroup {
  using P = Products<typename Kv::Product, kDim, kVDim>;
  using Stages = TileStages<kStages>;
  static constexpr int kWarpgroups = wide_warpgroups(kDim);
  static constexpr bool kOwnQueries = has_own_queries(kDim);
  static_assert(!kOwnQueries || !Variant::kTails, "a group without rows of an item would miss its tails' tiles");

 public:
  __device__ WideWarpgroup(const Params& p, const WorkItems& items, Memory& memory,
                           WideStatistics (&statistics)[Memory::kBuffers],
                           WideBarriers<kStages, Memory::kBuffers>& barriers)
      : p_(p), items_(items), memory_(memory), statistics_(statistics), ring_(barriers.ring), queries_(barriers.queries) {}

  // All wide items of one look-up.
  __device__ void run() {
    while (queries_.item() < items_.count(kWide)) run_item();
  }

 private:
  // The next item. P V of a KV tile overlaps the softmax of the next one.
  __device__ __forceinline__ void run_item() {
    const Item& item = items_.get(kWide, queries_.item());
    const int warpgroup = this_warpgroup();
    const bool alternates = alternates_tiles<kDim>(item);
    const bool alone = kWarpgroups > 1 && item.m == kWarpgroupRows && !alternates;  // one warpgroup computes it
    int stride = kWarpgroups == 1 ? 1 : int(fresh(alternates ? kAlternating : 1));  // KV tiles to this warpgroup's next one
    bool idle;
    if constexpr (kOwnQueries)
      idle = !queries_.takes(warpgroup, item.m);
    else
      idle = alternates ? warpgroup >= kAlternating
             : alone    ? warpgroup != queries_.item() % kWarpgroups
                        : warpgroup * kWarpgroupRows >= item.m;
    int arrivals =
        kArrivals / (item.m / kWarpgroupRows);  // by each warp that reads a stage; all together always make the same number
    int tile = tiles_ + (alternates ? warpgroup : 0);                 // this warpgroup's next KV tile
    int left = item.tokens - (alternates ? warpgroup * kTokens : 0);  // tokens from there on
    tiles_ += tiles_of(item.tokens);
    if constexpr (kOwnQueries) {
      if (idle) return queries_.advance(item.m);
      queries_.wait_full(warpgroup);
    } else {
      queries_.wait_full();
    }
    fence_async_proxy();
    auto& queries = memory_.queries[buffer()];
    bool tails = Variant::kTails && item.tails;
    int draft = tails ? 0 : item.draft;
    if (idle) {
      if constexpr (Variant::kTails) {
        if (tails) tiles_ += item.count * tail_tiles(queries, item.count);
      }
      release_queries();
      return;
    }
    Softmax softmax;
    float o[P::kOutputs], s[32], correction[2];
    uint32_t weights[kTokens / 16][4];
#pragma unroll
    for (int i = 0; i < P::kOutputs; ++i) o[i] = 0;
    const int q_panel = int(fresh(queries_.rows(item.m) * kPanelRow));
    const uint32_t q = shared_address(queries.q) + first_row(item.m) * kPanelRow;
    const auto start_scores = [&](const Stages& stages) {
      stages.wait_full(false);
      fence_async_proxy();
      P::scores(s, q, q_panel, __shfl_sync(~0u, address(stages, false), 0));
    };
    const auto start_values = [&](const Stages& stages) {
      stages.wait_full(true);
      fence_async_proxy();
      P::values(o, weights, __shfl_sync(~0u, address(stages, true), 0));
    };
    const auto pack = [&] {
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) pack_weights<typename Kv::Product>(weights[step], &s[8 * step]);
    };
    // item.m is read again here: registers are few.
    const auto mask = [&](int half) { return queries.masks[first_row(item.m) + row() + half * 8]; };
    const auto behind = [&](int half) { return queries.behind[first_row(item.m) + row() + half * 8]; };
    // First the shared KV; then, with tails, this warpgroup's own.
#pragma unroll 1
    while (true) {
      if (left > 0) {
        Stages stages(ring_, unsigned(tile));
        start_scores(stages);
        P::template wait<0>();
        release_k(stages, arrivals);
        softmax.template update<8>(s, left, draft, mask, behind, p_, correction);
        if constexpr (Variant::kTails) rescale<P::kOutputs>(o, correction);
        pack();
        while (true) {
          tile += stride;
          left -= Variant::kTails ? (alternates ? kAlternating * kTokens : kTokens) : stride * kTokens;
          if (left <= 0) {
            start_values(stages);
            P::template wait<0>();
            release_v(stages, arrivals);
            break;
          }
          const Stages next = stages.further(stride);
          start_scores(next);
          start_values(stages);
          P::template wait<1>();
          release_k(next, arrivals);
          softmax.template update<8>(s, left, draft, mask, behind, p_, correction);
          // Never true. Without a branch here ptxas sinks the softmax below the wait, and it no longer overlaps the
          // product.
          if (softmax.sum[0] + softmax.sum[1] < 0) nap();
          P::template wait<0>();
          release_v(stages, arrivals);
          rescale<P::kOutputs>(o, correction);
          pack();
          stages = next;
        }
      }
      if constexpr (Variant::kTails) {
        // This warpgroup's tail has ended, others have not: release the rest of the stages.
#pragma unroll 1
        for (; tile < tiles_; tile += stride) pass(Stages(ring_, unsigned(tile)), arrivals);
      }
      if (!Variant::kTails || !tails) break;
      tails = false, arrivals = kArrivals;
      tile = tiles_ + warpgroup, stride = item.count, left = queries.tail_tokens[warpgroup], draft = item.draft;
      tiles_ += item.count * tail_tiles(queries, item.count);
    }
    softmax.finish();
    const bool summed_up = alternates_tiles<kDim>(item);  // computed again: registers are few
    // The scratch is the part of Q's buffer behind the item's 64 rows.
    if (!kOwnQueries && summed_up)
      reduce_warpgroups(softmax, o, reinterpret_cast<float*>(queries.q + kWarpgroupRows * panels(kDim) * kPanelRow));
    else
      sync_threads(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);  // no product reads Q any more
    if (!summed_up || warpgroup == 0) write(item.m, softmax, o);
    release_queries();
  }

  __device__ uint32_t address(const Stages& stages, bool is_v) const {
    return shared_address(memory_.ring) + stages.stage(is_v) * kStageBytes<kDim>;
  }

  // This warp is done with a stage.
  __device__ static void release(uint32_t empty_barrier, int arrivals) {
    if (lane_id() == 0) arrive(empty_barrier, arrivals);
  }
  __device__ static void release_k(const Stages& stages, int arrivals) { release(stages.empty_barrier(false), arrivals); }
  __device__ static void release_v(const Stages& stages, int arrivals) { release(stages.empty_barrier(true), arrivals); }

  // Releases a tile's stages unread. They must be full first: a stage that is still empty would be released twice. And all
  // lanes must have seen it full: a lane that looked only after the release could miss that phase and wait for ever.
  __device__ static void pass(const Stages& stages, int arrivals) {
    stages.wait_full(false), stages.wait_full(true);
    __syncwarp();
    release_k(stages, arrivals), release_v(stages, arrivals);
  }

  // Every thread arrives, because single threads read targets and masks, not only wgmma.
  __device__ void release_queries() {
    if constexpr (kOwnQueries) {
      arrive(queries_.empty_barrier(this_warpgroup()));
      queries_.advance(items_.get(kWide, queries_.item()).m);
    } else {
      arrive(queries_.empty_barrier());
      queries_.advance();
    }
  }

  // Of Q of this warpgroup's rows of the item.
  __device__ int buffer() const {
    if constexpr (kOwnQueries)
      return this_warpgroup();
    else
      return queries_.buffer();
  }

  // A shuffle tells the compiler that the value is uniform in a warp; otherwise it assumes divergence.
  __device__ static int this_warpgroup() { return __shfl_sync(~0u, thread_of_cta() / kWarpgroupThreads, 0); }
  // The first row of this warpgroup in the buffer of Q of a query tile of `m` rows.
  __device__ static int first_row(int m) {
    return kWarpgroups == 1 || kOwnQueries || m == kWarpgroupRows ? 0 : this_warpgroup() * kWarpgroupRows;
  }
  // The first of this thread's two rows, of the warpgroup's 64; the second is 8 further.
  __device__ static int row() {
    const unsigned thread = thread_of<kWarpgroupThreads>();
    return thread / kWarpSize * 16 + thread % kWarpSize / 4;
  }

  // Merges the second warpgroup's results into the first's, thread by thread: both have the same rows and columns. The
  // scratch may be overwritten when all threads have released Q.
  __device__ void reduce_warpgroups(Softmax& softmax, float (&o)[P::kOutputs], float* scratch) {
    auto& statistics = statistics_[buffer()];
    const int thread = thread_of<kWarpgroupThreads>(), warpgroup = this_warpgroup();
    if (warpgroup == 1) {
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) scratch[i * kWarpgroupThreads + thread] = o[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (thread % 4 == 0) {
          statistics.row_max[row() + half * 8] = softmax.row_max[half];
          statistics.sum[row() + half * 8] = softmax.sum[half];
        }
      }
    }
    sync_threads(kWideBarrier, kAlternating * kWarpgroupThreads);
    if (warpgroup == 1) return;
    float own[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row_max = statistics.row_max[row() + half * 8], higher = fmaxf(row_max, softmax.row_max[half]);
      own[half] = weight(softmax.row_max[half], higher, p_);
      other[half] = weight(row_max, higher, p_);
      softmax.sum[half] = softmax.sum[half] * own[half] + statistics.sum[row() + half * 8] * other[half];
      softmax.row_max[half] = higher;
    }
#pragma unroll
    for (int i = 0; i < kVDim / 2; ++i)
      o[i] = o[i] * own[i / 2 % 2] + scratch[i * kWarpgroupThreads + thread] * other[i / 2 % 2];
  }

  // Writes this warpgroup's rows of O. They go through shared memory, over its rows of Q, so that threads store 16 bytes of
  // a row side by side: direct stores of column pairs took an item of three warpgroups 1.7 us
  // (benchmarks/notes/kernels-wide.md, "Where an item's time goes").
  __device__ void write(int m, const Softmax& softmax, const float (&o)[P::kOutputs]) const {
    const Results<T, kVDim> results(p_);
    auto& queries = memory_.queries[buffer()];
    const int first_row = this->first_row(m), panel = queries_.rows(m) * kPanelRow;
    const unsigned lane = lane_id();
    uint8_t* const rows = queries.q + first_row * kPanelRow;
    const RowTarget targets[2] = {RowTarget(queries.targets[first_row + row()]),
                                  RowTarget(queries.targets[first_row + row() + 8])};
    float norm[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.sum[half], row_max = softmax.row_max[half];
      norm[half] = norm_of<Kv>(Variant::kSinks ? sum_with_sink(sum, row_max, targets[half], p_) : sum, p_);
      if (lane % 4 == 0 && targets[half].used()) results.store_lse2(targets[half], lse2(row_max, sum, p_));
    }
    const int first = row() - int(lane / 4);  // of this warp's 16 rows
#pragma unroll
    for (int step = 0; step < kVDim / 16; ++step) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = results.pack(targets[i % 2],
                                make_float2(o[8 * step + 2 * i] * norm[i % 2], o[8 * step + 2 * i + 1] * norm[i % 2]));
#if PAT_WGMMA
      store_matrices(pairs, shared_address(rows) + panel_offset(first + lane % 16, 2 * step + lane / 16, panel));
#else
#pragma unroll
      for (int i = 0; i < 4; ++i)
        reinterpret_cast<uint32_t*>(rows + panel_offset(first + lane / 4 + i % 2 * 8, 2 * step + i / 2, panel))[lane % 4] =
            pairs[i];
#endif
    }
    __syncwarp();
    constexpr int kRowThreads = row_threads(kVDim * 2);
    const int column = lane % kRowThreads;
#pragma unroll 4
    for (int i = 0; i < 16; i += kWarpSize / kRowThreads) {
      const int at = first + lane / kRowThreads + i;
      const RowTarget to(queries.targets[first_row + at]);
      if (!to.used() || column >= kVDim / 8) continue;
      results.store_packed(to, column * 8, *reinterpret_cast<const uint4*>(rows + panel_offset(at, column, panel)));
    }
  }

  const Params& p_;
  const WorkItems& items_;
  Memory& memory_;
  WideStatistics (&statistics_)[Memory::kBuffers];
  RingBarriers<kStages>& ring_;
  Queries<kDim, Memory::kBuffers> queries_;
  int tiles_ = 0;  // KV tiles through the ring, up to the end of this item
};

}  // namespace pat
