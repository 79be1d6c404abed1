// Items of more rows. With 128 rows each of two warpgroups has half of them; with 64 they take turns at the tiles and
// sum up at the end. K and V come through the ring.
#pragma once

#include "products.cuh"
#include "results.cuh"
#include "ring.cuh"

namespace pat {

struct WideStatistics {
  float top[64], sum[64];  // of the second group, where both have the same rows
};

template <typename T, int kDim, int kUnits>
class WideGroup {
  using P = Products<T, kDim>;
  static constexpr int kGroups = groups(kDim), kComputing = kGroups * kGroupThreads;
  static constexpr int kRowThreads = row_threads(kDim);

 public:
  __device__ WideGroup(const Params& p, Items& items, const RingCursor<kDim, kUnits>& cursor, uint8_t* q,
                       float* scratch, WideStatistics& statistics)
      : p_(p),
        items_(items),
        k_(cursor),
        v_(cursor),
        q_(q),
        scratch_(scratch),
        statistics_(statistics),
        group_(__shfl_sync(~0u, int(threadIdx.x / kGroupThreads), 0)) {
    v_.advance();
  }

  __device__ void run(int tiles) {
    items_.restart();
    do {
      for (uint64_t pending = items_.with_tiles(tiles); pending != 0; pending &= pending - 1) {
        const Item& item = items_[__ffsll(pending) - 1];
        sync_threads(kWideBarrier, kComputing);  // Q of the item before may still be in use
        copy_q(item);
        fence_async_proxy();
        sync_threads(kWideBarrier, kComputing);
        run_item(item, kGroups == 2 && item.m == 64);
      }
    } while (items_.next());
  }

 private:
  __device__ void copy_q(const Item& item) {
    const int32_t* queries = p_.section(kQueries) + item.first;
    const int rows = item.count * p_.group, thread = fresh(threadIdx.x), column = thread % kRowThreads;
    if (column >= kDim / 8) return;
#pragma unroll 4
    for (int row = thread / kRowThreads; row < item.m; row += kComputing / kRowThreads) {
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < rows)
        value = *reinterpret_cast<const uint4*>(q_row<T>(p_, item, queries[p_.query_of(row)], row) + column * 8);
      *reinterpret_cast<uint4*>(q_ + panel_offset(row, column, item.m * kPanelRow)) = value;
    }
  }

  // The second product of a tile runs beside the softmax of the next one.
  __device__ __forceinline__ void run_item(const Item& item, bool in_turns) {
    Softmax softmax;
    float o[P::kOutputs], s[32], factor[2];
    uint32_t weights[kTokens / 16][4];
#pragma unroll
    for (int i = 0; i < P::kOutputs; ++i) o[i] = 0;
    const int q_panel = item.m * kPanelRow;
    const uint32_t q = shared_address(q_) + (in_turns ? 0 : group_ * 64 * kPanelRow);
    int tokens = item.tokens;  // not yet begun, others' too
    const auto skip_others = [&](RingCursor<kDim, kUnits>& cursor, bool any) {
      if (in_turns && any) skip(cursor);
    };
    const auto start_scores = [&] {
      k_.wait_full();
      fence_async_proxy();
      P::scores(s, q, q_panel, __shfl_sync(~0u, k_.memory(), 0));
    };
    const auto start_values = [&] {
      v_.wait_full();
      fence_async_proxy();
      P::values(o, weights, __shfl_sync(~0u, v_.memory(), 0));
    };
    const auto pack = [&] {
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) pack_weights<T>(weights[step], &s[8 * step]);
    };
    if (group_ == 1 && tokens > 0) {
      skip_others(k_, true);
      skip_others(v_, true);
      tokens -= in_turns ? kTokens : 0;
    }
    if (tokens > 0) {
      start_scores();
      P::template wait<0>();
      release(k_);
      softmax.template update<8>(s, tokens, p_, factor);
      pack();
      while (true) {
        // Behind this tile, another group's is passed over.
        const bool others = tokens > kTokens;
        skip_others(k_, others);
        const int next = tokens - (in_turns ? 2 : 1) * kTokens;
        if (next <= 0) {
          start_values();
          P::template wait<0>();
          release(v_);
          skip_others(v_, others);
          break;
        }
        start_scores();
        start_values();
        P::template wait<1>();
        release(k_);
        softmax.template update<8>(s, next, p_, factor);
        P::template wait<0>();
        release(v_);
        skip_others(v_, others);
        rescale<P::kOutputs>(o, factor);
        pack();
        tokens = next;
      }
    }
    softmax.finish();
    if (in_turns) {
      add_up(softmax, o);
      if (group_ != 0) return;
    }
    const Results<T, kDim> results(p_, item);
    write_fragments(results, (in_turns ? 0 : group_ * 64) + row(), softmax, o, p_);
  }

  // Passes over a unit that is the other group's. It must be full before it is given back, or it would count twice.
  __device__ static void skip(RingCursor<kDim, kUnits>& cursor) {
    cursor.wait_full();
    release(cursor);
  }

  // The unit is free once every warp has said so; on to the next of its kind.
  __device__ static void release(RingCursor<kDim, kUnits>& cursor) {
    if (fresh(threadIdx.x) % kWarpSize == 0) arrive(cursor.free_barrier());
    cursor.advance(2);
  }

  // The first of this thread's two rows of its group's 64.
  __device__ static int row() {
    const int thread = fresh(threadIdx.x);
    return thread % kGroupThreads / kWarpSize * 16 + thread % kWarpSize / 4;
  }

  // Adds the second group's results to the first's: thread by thread, for both have the same rows and columns.
  __device__ void add_up(Softmax& softmax, float (&o)[P::kOutputs]) {
    const int thread = fresh(threadIdx.x) % kGroupThreads;
    if (group_ == 1) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) scratch_[i * kGroupThreads + thread] = o[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (thread % 4 == 0) {
          statistics_.top[row() + half * 8] = softmax.top[half];
          statistics_.sum[row() + half * 8] = softmax.sum[half];
        }
      }
    }
    sync_threads(kWideBarrier, kComputing);
    if (group_ == 1) return;
    float own[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = statistics_.top[row() + half * 8], higher = fmaxf(top, softmax.top[half]);
      own[half] = weight(softmax.top[half], higher, p_);
      other[half] = weight(top, higher, p_);
      softmax.sum[half] = softmax.sum[half] * own[half] + statistics_.sum[row() + half * 8] * other[half];
      softmax.top[half] = higher;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i)
      o[i] = o[i] * own[i / 2 % 2] + scratch_[i * kGroupThreads + thread] * other[i / 2 % 2];
  }

  const Params& p_;
  Items& items_;
  RingCursor<kDim, kUnits> k_, v_;
  uint8_t* const q_;
  float* const scratch_;
  WideStatistics& statistics_;
  const int group_;
};

}  // namespace pat
