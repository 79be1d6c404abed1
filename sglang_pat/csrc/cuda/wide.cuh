// Items of more rows. With 128 rows each of two warpgroups has half of them; with 64 they take turns at the tiles and
// sum up at the end. K and V come through the ring.
#pragma once

#include "products.cuh"
#include "results.cuh"
#include "ring.cuh"

namespace pat {

template <int kDim>
struct WideStatistics {
  float top[64], sum[64];  // of the second group, where both have the same rows
};

template <typename T, int kDim, int kUnits>
class WideGroup {
  using P = Products<T, kDim>;
  static constexpr int kGroups = groups(kDim), kComputing = kGroups * kGroupThreads;
  static constexpr int kRowThreads = row_threads(kDim);
  static constexpr int kBarrier = 8;  // of all that compute

 public:
  __device__ WideGroup(const Params& p, Items& items, const RingCursor<kDim, kUnits>& cursor, uint8_t* q, float* scratch,
                       WideStatistics<kDim>& statistics)
      : p_(p), items_(items), cursor_(cursor), q_(q), scratch_(scratch), statistics_(statistics),
        group_(__shfl_sync(~0u, int(threadIdx.x / kGroupThreads), 0)) {}

  __device__ void run(int tiles) {
    items_.restart();
    do {
      for (uint32_t pending = items_.with_tiles(tiles); pending != 0; pending &= pending - 1) {
        const Item& item = items_[__ffs(pending) - 1];
        sync_threads(kBarrier, kComputing);  // Q of the item before may still be in use
        copy_q(item);
        fence_async_proxy();
        sync_threads(kBarrier, kComputing);
        run_item(item, kGroups == 2 && item.m == 64);
      }
    } while (items_.next());
  }

 private:
  __device__ void copy_q(const Item& item) {
    const int32_t* queries = p_.plan + p_.plan[kQueries] + item.first;
    const int rows = item.count * p_.group, thread = fresh(threadIdx.x), column = thread % kRowThreads;
    if (column >= kDim / 8) return;
#pragma unroll 4
    for (int row = thread / kRowThreads; row < item.m; row += kComputing / kRowThreads) {
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < rows)
        value = *reinterpret_cast<const uint4*>(static_cast<const T*>(p_.q) + queries[p_.query_of(row)] * p_.q_row +
                                                (item.head * p_.group + p_.head_of(row)) * p_.q_head + column * 8);
      *reinterpret_cast<uint4*>(q_ + panel_offset(row, column, item.m * kPanelRow)) = value;
    }
  }

  __device__ __forceinline__ void run_item(const Item& item, bool in_turns) {
    Softmax softmax;
    float o[P::kOutputs];
#pragma unroll
    for (int i = 0; i < P::kOutputs; ++i) o[i] = 0;
    const int q_panel = item.m * kPanelRow;
    const uint32_t q = shared_address(q_) + (in_turns ? 0 : group_ * 64 * kPanelRow);
    bool own = !in_turns || group_ == 0;
#pragma unroll 1
    for (int begin = 0; begin < item.tokens; begin += kTokens, own ^= in_turns) {
      float s[32];
      cursor_.wait_full();
      if (own) {
        fence_async_proxy();
        P::scores(s, q, q_panel, __shfl_sync(~0u, cursor_.memory(), 0));
        P::template wait<0>();
      }
      release();
      uint32_t weights[kTokens / 16][4];
      if (own) {
        float factor[2];
        softmax.template update<8>(s, item.tokens - begin, p_, factor);
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
          for (int i = 0; i < P::kOutputs; ++i) o[i] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) pack_weights<T>(weights[step], &s[8 * step]);
      }
      cursor_.wait_full();
      if (own) {
        fence_async_proxy();
        P::values(o, weights, __shfl_sync(~0u, cursor_.memory(), 0));
        P::template wait<0>();
      }
      release();
    }
    softmax.finish();
    if (in_turns) {
      add_up(softmax, o);
      if (group_ != 0) return;
    }
    const int32_t* plan = p_.plan;
    const Results<T, kDim> results(p_, plan + plan[kQueries] + item.first, plan + plan[kSlots] + item.first, item.count,
                                   item.head);
    write_fragments(results, (in_turns ? 0 : group_ * 64) + row(), softmax, o, p_);
  }

  // The unit is free once every warp has said so.
  __device__ void release() {
    if (fresh(threadIdx.x) % kWarpSize == 0) cursor_.set_free();
    cursor_.advance();
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
    sync_threads(kBarrier, kComputing);
    if (group_ == 1) return;
    float own[2], other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = statistics_.top[row() + half * 8], higher = fmaxf(top, softmax.top[half]);
      own[half] = softmax.top[half] == -INFINITY ? 0 : exp2_fast((softmax.top[half] - higher) * p_.scale_log2);
      other[half] = top == -INFINITY ? 0 : exp2_fast((top - higher) * p_.scale_log2);
      softmax.sum[half] = softmax.sum[half] * own[half] + statistics_.sum[row() + half * 8] * other[half];
      softmax.top[half] = higher;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i)
      o[i] = o[i] * own[i / 2 % 2] + scratch_[i * kGroupThreads + thread] * other[i / 2 % 2];
  }

  const Params& p_;
  Items& items_;
  RingCursor<kDim, kUnits> cursor_;
  uint8_t* const q_;
  float* const scratch_;
  WideStatistics<kDim>& statistics_;
  const int group_;
};

}  // namespace pat
