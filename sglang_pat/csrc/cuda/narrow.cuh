// Items of up to 16 rows: memory-bound, and many. Each warp reads and computes for itself, without a barrier: two chunks of
// 16 tokens at a time where there are two, while others are on their way, across the ends of items. An item with few
// tokens is one warp's. A longer one is everybody's: the warps take turns at its chunks and sum up at its end, while the
// copies for the next one run on.
#pragma once

#include "items.cuh"
#include "results.cuh"
#include "softmax.cuh"

namespace pat {

constexpr int kNarrowM = 16;
// More tokens than this are shared; where a worker has fewer items than warps, more than a chunk.
constexpr int kAloneTokens = 128, kAloneTokensOfFew = kChunkTokens;
// Chunks in shared memory for each warp; fewer where there is less of it.
constexpr int kNarrowStages = PAT_ARCH == 900 || PAT_ARCH == 1000 ? 3 : 2;

template <int kDim>
struct NarrowSizes {
  static constexpr int kPanel = kChunkTokens * kPanelRow;
  static constexpr int kTile = panels(kDim) * kPanel;  // a chunk's K, or its V
  static constexpr int kStage = 2 * kTile;
  static constexpr int kWarp = kNarrowStages * kStage;
};

// Of the warps that share an item.
template <int kWarps>
struct NarrowStatistics {
  float top[kWarps][kNarrowM], sum[kWarps][kNarrowM];
  int stage[kWarps];  // where each left its results
};

template <typename T, int kDim, int kWarps>
class NarrowWarp {
  using S = NarrowSizes<kDim>;
  static constexpr int kSteps = kDim / 16;
  // Reading Q ahead of an item and computing two chunks at a time: above 128 columns the registers do not suffice.
  static constexpr bool kReadAhead = kDim <= 128, kPairs = kDim <= 128;
  static constexpr int kSlotsAhead = kPairs ? 2 : 1;  // chunks whose slots are on their way
  static constexpr int kRowThreads = row_threads(kDim);
  static constexpr int kRows = kChunkTokens * kRowThreads / kWarpSize;  // that a lane copies: one after the other

  // What a warp does, chunk after chunk: of its own items all, of shared ones every kWarps-th.
  struct Cursor {
    uint64_t pending;   // items of the look-up behind this one
    int alone;          // items so far that were one warp's
    int at;             // the item; -1 behind the last
    int begin, tokens;  // of its tokens, where the chunk begins; how many it has
    int step;           // tokens to the next chunk

    __device__ bool last() const { return begin + step >= tokens; }
  };

  // A chunk that will be copied: the slot of this lane's token, the KV head, and tokens; none at all if they are negative.
  struct Chunk {
    int slot, head, tokens;
  };

 public:
  __device__ NarrowWarp(const Params& p, Items& items, uint8_t* memory, NarrowStatistics<kWarps>& statistics)
      : p_(p), items_(items), memory_(memory), statistics_(statistics) {}

  __device__ void run() {
    items_.restart();
    do run_window();
    while (items_.next());
  }

 private:
  __device__ static int lane() { return fresh(threadIdx.x) % kWarpSize; }
  __device__ static int warp() { return fresh(threadIdx.x) / kWarpSize; }
  // Where a stage of a warp is.
  __device__ uint8_t* stage(int warp, int number) const { return memory_ + warp * S::kWarp + number * S::kStage; }
  __device__ static int next_stage(int number) { return number == kNarrowStages - 1 ? 0 : number + 1; }

  // The items of one look-up.
  __device__ void run_window() {
    Cursor reader{items_.with_tiles(kNarrowM), alone_, -1, 0, 0, 0};
    next_item(reader);
    Cursor user = reader;
    int copied = 0, used = 0;
#pragma unroll 1
    for (int i = 0; i < kSlotsAhead; ++i) read_slots(reader);
#pragma unroll 1
    for (int i = 0; i < kNarrowStages; ++i) copy_next(reader, copied);
    if (kReadAhead && user.at >= 0) load_q(items_[user.at], 0, next_q_);
#pragma unroll 1
    while (user.at >= 0) {
      const Item& item = items_[user.at];
      take_q(item);
      Cursor following = user;
      next_item(following);
      if (kReadAhead && following.at >= 0) load_q(items_[following.at], 0, next_q_);
      softmax_ = Softmax();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) (&o_[0][0])[i] = 0;
      const bool shared = user.step > kChunkTokens;
      bool pair;
      while (true) {
        pair = kPairs && !user.last();
        const uint32_t first = shared_address(stage(warp(), used));
        if (kPairs && pair) {
          wait_copies<kNarrowStages - 2>();
          __syncwarp();
          used = next_stage(used);
          const uint32_t second = shared_address(stage(warp(), used));
          if constexpr (kPairs) compute<2>(first, second, user.tokens - user.begin, user.step);
          user.begin += user.step;
        } else {
          wait_copies<kNarrowStages - 1>();
          __syncwarp();
          compute<1>(first, first, user.tokens - user.begin, 0);
        }
        if (user.last()) break;
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i <= int(pair); ++i) copy_next(reader, copied);
        user.begin += user.step;
        used = next_stage(used);
      }
      // The memory of the last chunk is needed to sum up, that of the one before is not.
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < int(pair) + int(!shared); ++i) copy_next(reader, copied);
      finish(item, shared, used);
      if (shared) copy_next(reader, copied);
      used = next_stage(used);
      user = following;
    }
    alone_ = reader.alone;
    wait_copies<0>();
  }

  // Moves on to the next item that is this warp's or everybody's.
  __device__ void next_item(Cursor& cursor) const {
    const int most = items_.total() < kWarps ? kAloneTokensOfFew : kAloneTokens;
    cursor.at = -1;
    while (cursor.pending != 0) {
      const int at = __ffsll(cursor.pending) - 1, tokens = items_[at].tokens, warp = NarrowWarp::warp();
      cursor.pending &= cursor.pending - 1;
      const bool shared = tokens > most;
      if (shared || cursor.alone++ % kWarps == warp) {
        cursor.at = at;
        cursor.tokens = tokens;
        cursor.begin = shared ? warp * kChunkTokens : 0;
        cursor.step = shared ? kWarps * kChunkTokens : kChunkTokens;
        return;
      }
    }
  }

  // Reads the slots of the reader's chunk, to be copied after those read before, and moves on to the next.
  __device__ void read_slots(Cursor& reader) {
#pragma unroll
    for (int i = 0; i + 1 < kSlotsAhead; ++i) ahead_[i] = ahead_[i + 1];
    Chunk& chunk = ahead_[kSlotsAhead - 1];
    chunk.tokens = -1;
    if (reader.at < 0) return;
    const Item& item = items_[reader.at];
    chunk.head = item.head;
    chunk.tokens = max(0, min(kChunkTokens, reader.tokens - reader.begin));
    if (lane() < chunk.tokens) chunk.slot = p_.req_to_token[item.slots + reader.begin + lane()];
    if (reader.last())
      next_item(reader);
    else
      reader.begin += reader.step;
  }

  // Copies K and V of the chunk whose slots were read first.
  __device__ void copy_next(Cursor& reader, int& number) {
    const Chunk chunk = ahead_[0];
    if (chunk.tokens >= 0) {
      const int lane = NarrowWarp::lane(), column = lane % kRowThreads, first = lane / kRowThreads * kRows;
      const char* k = static_cast<const char*>(p_.k) + chunk.head * p_.k_head + column * 16;
      const char* v = static_cast<const char*>(p_.v) + chunk.head * p_.v_head + column * 16;
      const uint32_t to = shared_address(stage(warp(), number)) + panel_offset(first, column, S::kPanel);
      if (kDim / 8 == kRowThreads && chunk.tokens == kChunkTokens) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i), place = next_row(to, i);
          copy16(place, k + uint64_t(slot) * p_.k_slot);
          copy16(place + S::kTile, v + uint64_t(slot) * p_.v_slot);
        }
      } else {
        const bool in_row = column < kDim / 8;
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          const uint32_t slot = __shfl_sync(~0u, chunk.slot, first + i), place = next_row(to, i);
          const bool valid = first + i < chunk.tokens;
          // V must be zero behind the end, where its weight is: what lies there may be NaN. K's scores are masked.
          if (in_row && valid) copy16(place, k + uint64_t(slot) * p_.k_slot);
          if (in_row) copy16_or_zero(place + S::kTile, v + (valid ? uint64_t(slot) * p_.v_slot : 0), valid);
        }
      }
      number = next_stage(number);
    }
    commit_copies();
    read_slots(reader);
  }

  // This thread's half of a row of Q, pairs of columns for each step; zeros where the row is no query's.
  __device__ void load_q(const Item& item, int half, uint32_t (&to)[kSteps][2]) const {
    const int row = lane() / 4 + half * 8;
    const bool valid = row < item.count * p_.group;
    const uint32_t* q = nullptr;
    if (valid) {
      const int query = query_of(p_, item, p_.query_of(row));
      q = reinterpret_cast<const uint32_t*>(q_row<T>(p_, item, query, row)) + lane() % 4;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      to[step][0] = valid ? q[step * 8] : 0;
      to[step][1] = valid ? q[step * 8 + 4] : 0;
    }
  }

  // The rows that were read ahead, and the others, if there are any.
  __device__ void take_q(const Item& item) {
    if constexpr (!kReadAhead) load_q(item, 0, next_q_);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) q_[step][0] = next_q_[step][0], q_[step][2] = next_q_[step][1];
    uint32_t others[kSteps][2] = {};
    if (item.count * p_.group > 8) load_q(item, 1, others);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) q_[step][1] = others[step][0], q_[step][3] = others[step][1];
  }

  // One chunk or two, whose K and V begin at `first` and `second`. `tokens` are left from the first one on, and `step`
  // further begins the second.
  template <int kChunks>
  __device__ __forceinline__ void compute(uint32_t first, uint32_t second, int tokens, int step) {
    float s[2 * kChunks][4] = {};
    const int lane = NarrowWarp::lane();
    const uint32_t k = panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, S::kPanel);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint32_t b[4];
        load_matrices(b, next_step((chunk == 0 ? first : second) + k, i, S::kPanel));
        Half<T>::mma(s[2 * chunk], q_[i], b[0], b[1]);
        Half<T>::mma(s[2 * chunk + 1], q_[i], b[2], b[3]);
      }
    }
    float factor[2];
    softmax_.template update<2 * kChunks>(&s[0][0], kChunks == 2 ? kChunkTokens + tokens - step : tokens, p_, factor);
    rescale<kDim / 2>(&o_[0][0], factor);
    const uint32_t v = S::kTile + panel_offset(lane % 16, lane / 16, S::kPanel);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t a[4];
      pack_weights<T>(a, &s[2 * chunk][0]);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t b[4];
        load_matrices_transposed(b, next_step((chunk == 0 ? first : second) + v, i, S::kPanel));
        Half<T>::mma(o_[2 * i], a, b[0], b[1]);
        Half<T>::mma(o_[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

  // `last` is the stage that was used last.
  __device__ void finish(const Item& item, bool shared, int last) {
    softmax_.finish();
    const Results<T, kDim> results(p_, item);
    if (shared)
      combine(results, last);
    else
      write_fragments(results, lane() / 4, softmax_, &o_[0][0], p_);
  }

  // Sums up what the warps have, in the memory of the chunk that each used last.
  __device__ void combine(const Results<T, kDim>& results, int last) {
    static_assert(kNarrowM * panels(kDim) * kPanelColumns * 4 <= S::kStage);
    const int lane = NarrowWarp::lane(), warp = NarrowWarp::warp();
    float* own = reinterpret_cast<float*>(stage(warp, last));
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      if (row >= results.rows()) continue;
      if (lane % 4 == 0) {
        statistics_.top[warp][row] = softmax_.top[half];
        statistics_.sum[warp][row] = softmax_.sum[half];
      }
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
        *reinterpret_cast<float2*>(own + place(row, i * 8 + lane % 4 * 2)) =
            make_float2(o_[i][2 * half], o_[i][2 * half + 1]);
    }
    if (lane == 0) statistics_.stage[warp] = last;
    sync_threads(kNarrowBarrier, kWarps * kWarpSize);
    constexpr int kColumns = 4 * kWarpSize;  // a warp for each row
#pragma unroll 1
    for (int row = warp; row < results.rows(); row += kWarps) {
      const auto to = results.row(row);
      float top = -INFINITY, sum = 0, factor[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) top = fmaxf(top, statistics_.top[i][row]);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        factor[i] = weight(statistics_.top[i][row], top, p_);
        sum += factor[i] * statistics_.sum[i][row];
      }
      const float norm = sum > 0 ? 1 / sum : 0;
      if (lane == 0) results.store_lse(to, lse(top, sum, p_));
#pragma unroll
      for (int i = 0; i < (kDim + kColumns - 1) / kColumns; ++i) {
        const int column = i * kColumns + lane * 4;
        if (column >= kDim) break;
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < kWarps; ++j) {
          const float4 x = *reinterpret_cast<const float4*>(
              reinterpret_cast<const float*>(stage(j, statistics_.stage[j])) + place(row, column));
          const float share = factor[j] * norm;
          total.x += x.x * share, total.y += x.y * share, total.z += x.z * share, total.w += x.w * share;
        }
        results.store(to, column, total);
      }
    }
    sync_threads(kNarrowBarrier, kWarps * kWarpSize);
  }

  // Chunks of eight columns are permuted by the row: no bank conflicts.
  __device__ static int place(int row, int column) {
    return row * panels(kDim) * kPanelColumns + (column ^ (row % 8 * 8));
  }

  const Params& p_;
  Items& items_;
  uint8_t* const memory_;
  NarrowStatistics<kWarps>& statistics_;
  int alone_ = 0;  // items of the look-ups before that were one warp's
  Chunk ahead_[kSlotsAhead];
  Softmax softmax_;
  uint32_t q_[kSteps][4];       // the left operand
  uint32_t next_q_[kSteps][2];  // of the next item, its first eight rows
  float o_[kDim / 8][4];
};

}  // namespace pat
