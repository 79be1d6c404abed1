// Items of up to 16 rows: memory-bound, and many. Each warp reads and computes for itself, without a barrier: 16 tokens
// while the next 16 are on their way, across the ends of items. An item with few tokens is one warp's, a longer one is
// shared by the four warps of a group, which take turns at its chunks and sum up at its end.
#pragma once

#include "items.cuh"
#include "results.cuh"
#include "softmax.cuh"

namespace pat {

constexpr int kNarrowM = 16;
// More tokens than this are shared by a group: with fewer, its warps would have less than a chunk each.
constexpr int kSharedTokens = kGroupWarps * kChunkTokens;

template <int kDim>
struct NarrowSizes {
  static constexpr int kPanel = kChunkTokens * kPanelRow;
  static constexpr int kTile = panels(kDim) * kPanel;  // a chunk's K, or its V
  static constexpr int kStage = 2 * kTile;
  static constexpr int kWarp = 2 * kStage;  // the chunk in use and the next
};

// Statistics of the warps that share an item.
template <int kWarps>
struct NarrowStatistics {
  float top[kWarps][kNarrowM], sum[kWarps][kNarrowM];
  int stage[kWarps];  // where each warp left its results
};

template <typename T, int kDim, int kWarps>
class NarrowWarp {
  using S = NarrowSizes<kDim>;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kRowThreads = row_threads(kDim);
  static constexpr int kRows = kChunkTokens * kRowThreads / kWarpSize;  // that a lane copies: one after the other

  // What a warp does of an item: all of its chunks, or every fourth.
  struct Part {
    int at;  // the item, among those of the look-up
    int tokens;
    bool shared;

    __device__ int chunks() const {
      // An item without tokens has a chunk without any.
      const int all = (max(1, tokens) + kChunkTokens - 1) / kChunkTokens;
      return shared ? (all - turn() + kGroupWarps - 1) / kGroupWarps : all;
    }
    // The first token of a chunk.
    __device__ int begin(int chunk) const {
      return (shared ? turn() + chunk * kGroupWarps : chunk) * kChunkTokens;
    }
    __device__ static int turn() { return fresh(threadIdx.x) / kWarpSize % kGroupWarps; }
  };

 public:
  __device__ NarrowWarp(const Params& p, Items& items, uint8_t* memory, NarrowStatistics<kWarps>& statistics)
      : p_(p), items_(items), memory_(memory), statistics_(statistics) {}

  __device__ void run() {
    items_.restart();
    do {
      pending_ = items_.with_tiles(kNarrowM);
      run_window();
    } while (items_.next());
  }

 private:
  __device__ static int lane() { return fresh(threadIdx.x) % kWarpSize; }
  __device__ static int warp() { return fresh(threadIdx.x) / kWarpSize; }
  // The memory of a chunk: the even or the odd ones of a warp.
  __device__ uint8_t* stage(int warp, int chunk) const { return memory_ + warp * S::kWarp + chunk % 2 * S::kStage; }

  // The items of one look-up.
  __device__ void run_window() {
    Part part, following;
    bool more = take(following);
    if (!more) return;
    read_slots(following, 0);
    copy_chunk(items_[following.at].head, following.tokens - following.begin(0));
#pragma unroll 1
    while (more) {
      part = following;
      more = take(following);
      const int chunks = part.chunks();
      load_q(items_[part.at]);
      softmax_ = Softmax();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) (&o_[0][0])[i] = 0;
      if (chunks > 1)
        read_slots(part, 1);
      else if (more)
        read_slots(following, 0);
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const bool inside = chunk + 1 < chunks;
        if (inside || more)
          copy_chunk(items_[inside ? part.at : following.at].head,
                     inside ? part.tokens - part.begin(chunk + 1) : following.tokens - following.begin(0));
        else
          commit_copies();
        if (chunk + 2 < chunks)
          read_slots(part, chunk + 2);
        else if (inside && more)
          read_slots(following, 0);
        wait_copies<1>();
        __syncwarp();
        const uint32_t k = shared_address(stage(warp(), used_));
        compute(k, k + S::kTile, part.tokens - part.begin(chunk));
        __syncwarp();
        ++used_;
      }
      finish(part);
    }
    wait_copies<0>();
  }

  // The next item that is this warp's, or its group's.
  __device__ bool take(Part& part) {
    while (pending_ != 0) {
      const int at = __ffs(pending_) - 1;
      pending_ &= pending_ - 1;
      const int tokens = items_[at].tokens;
      const bool shared = tokens > kSharedTokens;
      const bool own = shared ? num_shared_++ % kGroups == warp() / kGroupWarps : num_alone_++ % kWarps == warp();
      if (own) {
        part = Part{at, tokens, shared};
        return true;
      }
    }
    return false;
  }

  // Lane i reads the slot of a chunk's i-th token.
  __device__ void read_slots(const Part& part, int chunk) {
    const int lane = NarrowWarp::lane(), token = part.begin(chunk) + lane;
    if (lane < kChunkTokens && token < part.tokens) slot_ = p_.req_to_token[items_[part.at].slots + token];
  }

  // Copies K and V of `tokens` tokens, at most a chunk, whose slots were read.
  __device__ void copy_chunk(int head, int tokens) {
    const int lane = NarrowWarp::lane(), column = lane % kRowThreads, first = lane / kRowThreads * kRows;
    const bool used = column < kDim / 8;
    const char* k = static_cast<const char*>(p_.k) + head * p_.k_head + column * 16;
    const char* v = static_cast<const char*>(p_.v) + head * p_.v_head + column * 16;
    const uint32_t to = shared_address(stage(warp(), copied_++)) + panel_offset(first, column, S::kPanel);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t slot = __shfl_sync(~0u, slot_, first + i);
      const bool valid = first + i < tokens;
      const uint32_t place = (to ^ (i % 8 << 4)) + i * kPanelRow;
      // V must be zero behind the end, where its weight is: what lies there may be NaN. K's scores are masked.
      if (used && valid) copy16(place, k + uint64_t(slot) * p_.k_slot, true);
      if (used) copy16(place + S::kTile, v + (valid ? uint64_t(slot) * p_.v_slot : 0), valid);
    }
    commit_copies();
  }

  // Q as the left operand; rows that are no query's are zero.
  __device__ void load_q(const Item& item) {
    const int rows = item.count * p_.group, lane = NarrowWarp::lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const bool valid = row < rows;
      const uint32_t* q = nullptr;
      if (valid) {
        const int query = p_.query_of(row) == 0 ? item.query : p_.plan[p_.plan[kQueries] + item.first + p_.query_of(row)];
        q = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p_.q) + query * p_.q_row +
                                              (item.head * p_.group + p_.head_of(row)) * p_.q_head) + lane % 4;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        q_[step][half] = valid ? q[step * 8] : 0;
        q_[step][half + 2] = valid ? q[step * 8 + 4] : 0;
      }
    }
  }

  __device__ void compute(uint32_t k, uint32_t v, int tokens) {
    float s[2][4] = {};
    const int lane = NarrowWarp::lane();
    const uint32_t k_first = k + panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, S::kPanel);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      load_matrices(b, next_step(k_first, step, S::kPanel));
      Half<T>::mma(s[0], q_[step], b[0], b[1]);
      Half<T>::mma(s[1], q_[step], b[2], b[3]);
    }
    float factor[2];
    softmax_.template update<2>(&s[0][0], tokens, p_, factor);
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o_[i][j] *= factor[j / 2];
      }
    }
    uint32_t a[4];
    pack_weights<T>(a, &s[0][0]);
    const uint32_t v_first = v + panel_offset(lane % 16, lane / 16, S::kPanel);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      load_matrices_transposed(b, next_step(v_first, step, S::kPanel));
      Half<T>::mma(o_[2 * step], a, b[0], b[1]);
      Half<T>::mma(o_[2 * step + 1], a, b[2], b[3]);
    }
  }

  __device__ void finish(const Part& part) {
    softmax_.finish();
    const int32_t* plan = p_.plan;
    const Item& item = items_[part.at];
    const Results<T, kDim> results(p_, plan + plan[kQueries] + item.first, plan + plan[kSlots] + item.first, item.count,
                                   item.head);
    if (part.shared)
      combine(results);
    else
      write_fragments(results, NarrowWarp::lane() / 4, softmax_, &o_[0][0], p_);
  }

  // Sums up what the warps of the group have, in the memory of the chunk that each used last.
  __device__ void combine(const Results<T, kDim>& results) {
    static_assert(kNarrowM * kDim * 4 <= S::kStage);
    const int lane = NarrowWarp::lane(), warp = NarrowWarp::warp(), group = warp / kGroupWarps, begin = group * kGroupWarps;
    float* own = reinterpret_cast<float*>(stage(warp, used_ + 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      if (lane % 4 == 0) {
        statistics_.top[warp][row] = softmax_.top[half];
        statistics_.sum[warp][row] = softmax_.sum[half];
      }
      if (row >= results.rows()) continue;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
        *reinterpret_cast<float2*>(own + place(row, i * 8 + lane % 4 * 2)) = make_float2(o_[i][2 * half], o_[i][2 * half + 1]);
    }
    if (lane == 0) statistics_.stage[warp] = (used_ + 1) % 2;
    sync_threads(kNarrowBarrier + group, kGroupThreads);
    constexpr int kThreadsPerRow = 8, kColumns = 4 * kThreadsPerRow;
    const int thread = fresh(threadIdx.x) % kGroupThreads, row = thread / kThreadsPerRow;
    const auto to = results.row(row);
    if (to.used) {
      float top = -INFINITY, sum = 0, factor[kGroupWarps];
      const float* from[kGroupWarps];
#pragma unroll
      for (int i = 0; i < kGroupWarps; ++i) top = fmaxf(top, statistics_.top[begin + i][row]);
#pragma unroll
      for (int i = 0; i < kGroupWarps; ++i) {
        const float other = statistics_.top[begin + i][row];
        factor[i] = other == -INFINITY ? 0 : exp2_fast((other - top) * p_.scale_log2);
        sum += factor[i] * statistics_.sum[begin + i][row];
        from[i] = reinterpret_cast<const float*>(stage(begin + i, statistics_.stage[begin + i]));
      }
      const int column = thread % kThreadsPerRow * 4;
      const float norm = sum > 0 ? 1 / sum : 0;
      if (column == 0) results.store_lse(to, lse(top, sum, p_));
#pragma unroll
      for (int i = 0; i < kDim / kColumns; ++i) {
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < kGroupWarps; ++j) {
          const float4 x = *reinterpret_cast<const float4*>(from[j] + place(row, i * kColumns + column));
          const float weight = factor[j] * norm;
          total.x += x.x * weight, total.y += x.y * weight, total.z += x.z * weight, total.w += x.w * weight;
        }
        results.store(to, i * kColumns + column, total);
      }
    }
    sync_threads(kNarrowBarrier + group, kGroupThreads);
  }

  // Chunks of eight columns are permuted by the row: no bank conflicts.
  __device__ static int place(int row, int column) { return row * kDim + (column ^ (row % 8 * 8)); }

  static constexpr int kNarrowBarrier = 1;

  const Params& p_;
  Items& items_;
  uint8_t* const memory_;
  NarrowStatistics<kWarps>& statistics_;
  uint32_t pending_ = 0;                  // items of the look-up that nobody was asked about yet
  int num_shared_ = 0, num_alone_ = 0;    // items so far
  int copied_ = 0, used_ = 0, slot_ = 0;  // chunks copied and used; this lane's token's slot in the next to copy
  Softmax softmax_;
  uint32_t q_[kSteps][4];
  float o_[kDim / 8][4];
};

}  // namespace pat
