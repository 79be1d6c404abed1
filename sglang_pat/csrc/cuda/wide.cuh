// Items of more rows. Each group of warps has 64 of them. Of a long item of 64 rows, two groups take turns at the tiles and
// sum up at the end; a short item is owned by one warpgroup, the next one by the next: each hides what the others wait for. With tails, each
// group goes on with a query's own KV, tile by tile in turn.
// K, V and Q come through the ring.
#pragma once

#include "products.cuh"
#include "results.cuh"
#include "ring.cuh"

namespace pat {

constexpr int kTurns = 2;  // groups that share a long item of 64 rows: as fast as memory already

struct WideStatistics {
  float row_max[64], sum[64];  // of the second group, where both have the same rows
};

// How far the computing warps are in the rings, with the items of one look-up.
template <int kStages, int kBuffers>
struct WideCursors {
  __device__ explicit WideCursors(WideBarriers<kStages, kBuffers>& barriers)
      : k(barriers.ring), v(barriers.ring), queries(barriers.queries) {
    v.advance();
  }
  RingCursor<kStages> k, v;
  QueryCursor<kBuffers> queries;
};

template <typename T, typename Kv, int kDim, int kVDim, int kStages, typename Memory, typename WorkItems>
class WideGroup {
  using P = Products<typename Kv::Product, kDim, kVDim>;
  using Ring = RingCursor<kStages>;
  static constexpr int kGroups = groups(kDim);

 public:
  __device__ WideGroup(const Params& p, const WorkItems& items, Memory& memory, WideStatistics& statistics,
                       WideCursors<kStages, Memory::kBuffers>& cursors)
      : p_(p),
        items_(items),
        memory_(memory),
        statistics_(statistics),
        k_(cursors.k),
        v_(cursors.v),
        queries_(cursors.queries) {}

  // The items of one look-up.
  __device__ void run() {
    while (queries_.item() < items_.count(kWide)) run_item();
  }

 private:
  // The next item. The second product of a tile runs beside the softmax of the next one.
  __device__ __forceinline__ void run_item() {
    const Item& item = items_.get(kWide, queries_.item());
    const int group = __shfl_sync(~0u, this_group(), 0);
    const bool in_turns = kGroups > 1 && item.m == kGroupRows && item.tokens > kOwnTokens;
    const bool alone = kGroups > 1 && item.m == kGroupRows && !in_turns;  // it is the owner's
    const int first_row = kGroups == 1 || item.m == kGroupRows ? 0 : group * kGroupRows;
    int tiles = int(unsigned(item.tokens + kTokens - 1) / kTokens);
    int stride = kGroups == 1 ? 1 : int(fresh(in_turns ? kTurns : 1));  // tiles to this group's next one
    const bool idle = in_turns ? group >= kTurns : alone ? group != queries_.item() % kGroups : first_row >= item.m;
    int tile = in_turns ? group : 0;          // this group's next one
    int left = item.tokens - tile * kTokens;  // tokens from there on
    queries_.wait_full();
    fence_async_proxy();
    auto& queries = memory_.queries[queries_.buffer()];
    bool tails = kHasTails && item.tails;
    int draft = tails ? 0 : item.draft;
    if (idle) {
      if constexpr (kHasTails) {
        if (tails) tiles += item.count * tail_tiles(queries, item.count);
      }
#pragma unroll 1
      for (tile = 0; tile < tiles; ++tile) skip(k_), skip(v_);
      release_queries();
      return;
    }
    Softmax softmax;
    float o[P::kOutputs], s[32], correction[2];
    uint32_t weights[kTokens / 16][4];
#pragma unroll
    for (int i = 0; i < P::kOutputs; ++i) o[i] = 0;
    const int q_panel = int(fresh(item.m * kPanelRow));
    const uint32_t q = shared_address(queries.q) + first_row * kPanelRow;
    const auto start_scores = [&] {
      k_.wait_full();
      fence_async_proxy();
      P::scores(s, q, q_panel, __shfl_sync(~0u, stage(k_), 0));
    };
    const auto start_values = [&] {
      v_.wait_full();
      fence_async_proxy();
      P::values(o, weights, __shfl_sync(~0u, stage(v_), 0));
    };
    const auto pack = [&] {
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) pack_weights<typename Kv::Product>(weights[step], &s[8 * step]);
    };
    // The other group's tiles.
    const auto skip_until = [&](Ring& cursor, int from, int until) {
      if (stride == 1) return;
#pragma unroll 1
      for (; from < until; ++from) skip(cursor);
    };
    const auto mask = [&](int half) { return queries.masks[first_row + row() + half * 8]; };
    const auto behind = [&](int half) { return queries.behind[first_row + row() + half * 8]; };
    // What is shared, and then, with tails, this group's own one.
#pragma unroll 1
    while (true) {
      skip_until(k_, 0, min(tile, tiles));
      skip_until(v_, 0, min(tile, tiles));
      if (left > 0) {
        start_scores();
        P::template wait<0>();
        release(k_);
        softmax.template update<8>(s, left, draft, mask, behind, p_, correction);
        if constexpr (kHasTails) rescale<P::kOutputs>(o, correction);
        pack();
        while (true) {
          const int next = tile + stride;
          left -= in_turns ? kTurns * kTokens : kTokens;
          if (left <= 0) {
            start_values();
            P::template wait<0>();
            release(v_);
            break;
          }
          skip_until(k_, tile + 1, next);
          start_scores();
          start_values();
          P::template wait<1>();
          release(k_);
          softmax.template update<8>(s, left, draft, mask, behind, p_, correction);
          // Never true. Without a branch here ptxas sinks the softmax below the wait, and nothing overlaps the product.
          if (softmax.sum[0] + softmax.sum[1] < 0) nap();
          P::template wait<0>();
          release(v_);
          skip_until(v_, tile + 1, next);
          rescale<P::kOutputs>(o, correction);
          pack();
          tile = next;
        }
        ++tile;
      }
      // V of the others' tiles may wait for K of theirs to be passed over.
#pragma unroll 1
      for (; tile < tiles; ++tile) skip(k_), skip(v_);
      if constexpr (!kHasTails) break;
      if (!tails) break;
      tails = false;
      tile = group, stride = item.count, draft = item.draft;
      tiles = item.count * tail_tiles(queries, item.count), left = queries.tail_tokens[group];
    }
    softmax.finish();
    const int rows = first_row + row();
    const RowTarget targets[2] = {RowTarget(queries.targets[rows]), RowTarget(queries.targets[rows + 8])};
    if (in_turns) add_up(softmax, o, reinterpret_cast<float*>(queries.q + 64 * panels(kDim) * kPanelRow));
    release_queries();
    if (!in_turns || this_group() == 0) write(targets, softmax, o);
  }

  __device__ uint32_t stage(const Ring& cursor) const {
    return shared_address(memory_.ring) + cursor.stage() * kStageBytes<kDim>;
  }

  // Passes over a stage that belongs to the other group. It must be full before it is released: one that is still empty would be released
  // twice. And all lanes must have seen it full: a lane that looked after the release could miss that phase, and wait for ever.
  __device__ static void skip(Ring& cursor) {
    cursor.wait_full();
    __syncwarp();
    release(cursor);
  }

  // A stage is empty once every warp has arrived; then on to this operand's next one, K and V taking turns.
  __device__ static void release(Ring& cursor) {
    if (lane_id() == 0) arrive(cursor.empty_barrier());
    cursor.advance(2);
  }

  // Q's buffer is empty once every thread has arrived: targets and masks are read by single threads, not by wgmma.
  __device__ void release_queries() {
    arrive(queries_.empty_barrier());
    queries_.advance();
  }

  __device__ static int this_group() { return thread_of_cta() / kGroupThreads; }
  // The first of this thread's two rows of its group's 64.
  __device__ static int row() {
    const unsigned thread = thread_of<kGroupThreads>();
    return thread / kWarpSize * 16 + thread % kWarpSize / 4;
  }

  // Adds the second group's results to the first's: thread by thread, for both have the same rows and columns.
  __device__ void add_up(Softmax& softmax, float (&o)[P::kOutputs], float* scratch) {
    const int thread = thread_of<kGroupThreads>();
    if (this_group() == 1) {
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i) scratch[i * kGroupThreads + thread] = o[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (thread % 4 == 0) {
          statistics_.row_max[row() + half * 8] = softmax.row_max[half];
          statistics_.sum[row() + half * 8] = softmax.sum[half];
        }
      }
    }
    sync_threads(kWideBarrier, kTurns * kGroupThreads);
    if (this_group() == 0) {
      float own[2], other[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_max = statistics_.row_max[row() + half * 8], higher = fmaxf(row_max, softmax.row_max[half]);
        own[half] = weight(softmax.row_max[half], higher, p_);
        other[half] = weight(row_max, higher, p_);
        softmax.sum[half] = softmax.sum[half] * own[half] + statistics_.sum[row() + half * 8] * other[half];
        softmax.row_max[half] = higher;
      }
#pragma unroll
      for (int i = 0; i < kVDim / 2; ++i)
        o[i] = o[i] * own[i / 2 % 2] + scratch[i * kGroupThreads + thread] * other[i / 2 % 2];
    }
    // The second group's next results, or Q of another item, must not overwrite these.
    sync_threads(kWideBarrier, kTurns * kGroupThreads);
  }

  // Rows `row()` and eight further of this group's are this thread's.
  __device__ void write(const RowTarget (&targets)[2], const Softmax& softmax, const float (&o)[P::kOutputs]) const {
    const Results<T, kVDim> results(p_);
    const int pair = thread_of<4>() * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!targets[half].used()) continue;
      const float sum = softmax.sum[half], row_max = softmax.row_max[half];
      const float norm = norm_of<Kv>(kSinks ? sum_with_sink(sum, row_max, targets[half], p_) : sum, p_);
      if (pair == 0) results.store_lse2(targets[half], lse2(row_max, sum, p_));
      results.template store_pairs<8>(targets[half], pair, [&](int i) {
        return make_float2(o[4 * i + 2 * half] * norm, o[4 * i + 2 * half + 1] * norm);
      });
    }
  }

  const Params& p_;
  const WorkItems& items_;
  Memory& memory_;
  WideStatistics& statistics_;
  Ring &k_, &v_;
  QueryCursor<Memory::kBuffers>& queries_;
};

}  // namespace pat
