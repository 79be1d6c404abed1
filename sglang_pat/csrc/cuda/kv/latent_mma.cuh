// Latents (MLA) where there is no wgmma: eight warps compute every work item together, KV tiles of 32
// tokens, by mma.sync. Scores are divided by rows and tokens, or in small items by tokens and K's columns, and add up in
// shared memory; each warp turns some rows into weights there; and each multiplies all weights with an eighth of V's
// columns, [rows, v_dim / 8] in registers as softmax.cuh describes. All warps load: two tiles are in shared memory, one of
// them on its way. Not timed on any GPU.
#pragma once

#include "../forward.cuh"
#include "latent_ring.cuh"

namespace pat {

constexpr int kLatentMmaWarps = 8, kLatentMmaThreads = kLatentMmaWarps * kWarpSize;
constexpr int kLatentMmaTokens = 32, kLatentMmaPanel = kLatentMmaTokens * kPanelRow;

template <int kDim, int kVDim, int kMost>
struct LatentMmaMemory {
  static constexpr int kParts = kMost == kNarrowM ? 2 : 1;      // of each score
  static constexpr int kScoreRow = kLatentMmaTokens + 4;        // padded: eight rows begin in other banks
  static constexpr int kWeightRow = kLatentMmaTokens * 2 + 16;  // bytes, likewise
  alignas(1024) uint8_t tiles[2][panels(kDim) * kLatentMmaPanel];
  alignas(1024) uint8_t q[panels(kDim) * kMost * kPanelRow];  // of one item; in the end its output
  alignas(16) uint8_t weights[kMost * kWeightRow];
  // Where kMost has one part, its smallest items still have two of fewer rows.
  alignas(16) float scores[kParts * kMost * kScoreRow];
  float corrections[kMost], norms[kMost];
  LatentRows<kMost> rows;
  AssignedItems<kLatentItems> assigned;
};

template <typename T, typename Kv, int kDim, int kVDim, int kMost, int kM>
class LatentMmaItem {
  using Product = typename Kv::Product;
  using Sizes = LatentSizes<kDim, kVDim>;
  using Memory = LatentMmaMemory<kDim, kVDim, kMost>;
  static constexpr int kTile = kLatentMmaTokens, kPanel = kLatentMmaPanel, kQPanel = kM * kPanelRow;
  static constexpr int kBlocks = kM / 16, kColumns = kVDim / kLatentMmaWarps, kSteps = kDim / 16;
  static constexpr bool kConverts = Kv::kBytes == 1;
  // Scores of a warp: 16 rows, and of small items every second step of K's columns.
  static constexpr int kParts = kM == kNarrowM ? 2 : 1, kScoreTokens = kTile * kBlocks * kParts / kLatentMmaWarps;
  // Softmax: rows of a warp, threads of a row, and tokens of a thread.
  static constexpr int kWarpRows = kM / kLatentMmaWarps, kRowThreads = kWarpSize / kWarpRows;
  static constexpr int kOwn = kTile / kRowThreads;
  // Loads: 16 bytes each, of a row of a panel of K.
  static constexpr int kCopyThreads = kPanelColumns * Kv::kBytes / kCopyBytes;
  static constexpr int kPanelsApart = kLatentMmaThreads / (kCopyThreads * kTile);
  static constexpr int kLoads = (panels(kDim) + kPanelsApart - 1) / kPanelsApart;
  static_assert(kScoreTokens % 8 == 0 && kColumns % 16 == 0 && kPanelsApart >= 1);

 public:
  __device__ LatentMmaItem(const Params& p, const Item& item, Memory& memory) : p_(p), item_(item), memory_(memory) {}

  // Nobody may still use the memory.
  __device__ __forceinline__ void run() {
    const int tokens = item_.tokens;
    if (thread_of_cta() < kM) look_up_latent_row<T>(p_, item_, thread_of_cta(), memory_.rows);
    slot_ = slot_of(0);
    next_slot_ = slot_of(kTile);
    __syncthreads();
    load_q();
    if (tokens > 0) start_load(0), finish_load(0);
    commit_copies();
    wait_copies<0>();
    if constexpr (!std::is_same_v<T, Product>) convert_q();
#pragma unroll
    for (int i = 0; i < kBlocks * kColumns / 2; ++i) (&o_[0][0][0])[i] = 0;
#pragma unroll 1
    for (int begin = 0; begin < tokens; begin += kTile) {
      const int at = begin / kTile % 2, left = tokens - begin;
      wait_copies<0>();
      __syncthreads();  // the tile is there, and nobody reads the one before
      if (left > kTile) {
        slot_ = next_slot_;
        next_slot_ = slot_of(begin + 2 * kTile);
        start_load(1 - at, left - kTile);
      }
      commit_copies();
      scores(memory_.tiles[at]);
      __syncthreads();
      weigh(left);
      __syncthreads();
      values(memory_.tiles[at]);
      if (left > kTile) finish_load(1 - at);
    }
    finish();
  }

 private:
  static constexpr int kQThreads = kPanelRow / kCopyBytes, kQStride = kLatentMmaThreads / kQThreads;
  __device__ static int q_column() { return thread_of_cta() % kQThreads; }

  // What this thread copies of Q, by panels: `function(row, panel, offset)`.
  template <typename Function>
  __device__ __forceinline__ void each_of_q(const Function& function) const {
#pragma unroll 1
    for (int row = thread_of_cta() / kQThreads; row < kM; row += kQStride) {
#pragma unroll 1
      for (int panel = 0; panel < panels(kDim); ++panel)
        if (q_column() < Sizes::columns(panel) / 8)
          function(row, panel, panel_offset(row, q_column(), 0) + panel * kQPanel);
    }
  }
  __device__ __forceinline__ void load_q() const {
    each_of_q([&](int row, int panel, uint32_t offset) {
      const bool used = memory_.rows.sources[row] != kNoSource, rope = panel == Sizes::kVPanels;
      const char* const q = static_cast<const char*>(rope ? p_.q_rope : p_.q);
      const uint32_t source = used ? rope ? memory_.rows.rope_sources[row] : memory_.rows.sources[row] : 0;
      copy16_or_zero(shared_address(memory_.q) + offset,
                     q + uint64_t(source) * kCopyBytes + (rope ? 0 : panel * kPanelRow) + q_column() * kCopyBytes, used);
    });
  }
  // In place, what this thread has copied.
  __device__ __forceinline__ void convert_q() const {
    each_of_q([&](int, int, uint32_t offset) {
      uint4& x = *reinterpret_cast<uint4*>(memory_.q + offset);
      x = convert_pairs<T, Product>(x);
    });
  }

  // This thread's part of the loads: 16 bytes of a row of every kPanelsApart-th panel.
  __device__ static int load_column() { return thread_of_cta() % kCopyThreads; }
  __device__ static int load_row() { return thread_of_cta() / kCopyThreads % kTile; }
  __device__ static int load_panel(int i) { return thread_of_cta() / (kCopyThreads * kTile) + i * kPanelsApart; }
  __device__ static bool loads(int panel) {
    return panel < panels(kDim) && load_column() < Sizes::columns(panel) * Kv::kBytes / kCopyBytes;
  }
  // The slot of this thread's row of the tile from `begin` on.
  __device__ __forceinline__ int slot_of(int begin) const {
    const int token = begin + load_row();
    return token < item_.tokens ? p_.req_to_token[item_.slots + token] : 0;
  }

  // Starts to load a tile of which `left` tokens are left. What is behind them becomes zero: weights are zero there, but
  // memory may hold NaN. Latents of 8 bits wait in registers.
  __device__ __forceinline__ void start_load(int at, int left) {
    const char* const from = static_cast<const char*>(p_.k) + uint64_t(uint32_t(slot_)) * p_.k_slot +
                             (Variant::kStraddles ? 0 : item_.kv.head) * p_.k_head + load_column() * kCopyBytes;
    const bool valid = load_row() < left;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int panel = load_panel(i);
      if constexpr (kConverts) {
        ahead_[i] = make_uint4(0, 0, 0, 0);
        if (valid && loads(panel)) ahead_[i] = *reinterpret_cast<const uint4*>(from + panel * kPanelColumns);
      } else if (loads(panel)) {
        copy16_or_zero(shared_address(memory_.tiles[at]) + panel_offset(load_row(), load_column(), 0) + panel * kPanel,
                       from + panel * kPanelRow, valid);
      }
    }
  }
  __device__ __forceinline__ void start_load(int at) { start_load(at, item_.tokens); }
  __device__ __forceinline__ void finish_load(int at) {
    if constexpr (kConverts) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int panel = load_panel(i);
        if (!loads(panel)) continue;
        uint8_t* const to = memory_.tiles[at] + panel * kPanel;
        const uint4 low = Kv::adjacent(ahead_[i].x, ahead_[i].y), high = Kv::adjacent(ahead_[i].z, ahead_[i].w);
        *reinterpret_cast<uint4*>(to + panel_offset(load_row(), 2 * load_column(), 0)) = low;
        *reinterpret_cast<uint4*>(to + panel_offset(load_row(), 2 * load_column() + 1, 0)) = high;
      }
    }
  }

  // This warp's scores, to shared memory.
  __device__ __forceinline__ void scores(const uint8_t* tile) {
    const unsigned lane = lane_id();
    const int block = warp_id() % kBlocks, part = warp_id() / kBlocks % kParts,
              first = warp_id() / (kBlocks * kParts) * kScoreTokens;
    const uint32_t q = shared_address(memory_.q), k = shared_address(tile);
    float s[kScoreTokens / 8][4] = {};
#pragma unroll 4
    for (int step = part; step < kSteps; step += kParts) {
      uint32_t a[4], b[4];
      load_matrices(a, q + panel_offset(block * 16 + lane % 16, 2 * step + lane / 16, kQPanel));
      // Of eight tokens the second half is loaded for nothing.
      const int token = kScoreTokens == 8 ? first + lane % 8 : first + lane % 8 + lane / 16 * 8;
      load_matrices(b, k + panel_offset(token, 2 * step + lane / 8 % 2, kPanel));
#pragma unroll
      for (int i = 0; i < kScoreTokens / 8; ++i) Half<Product>::mma(s[i], a, b[2 * i], b[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < kScoreTokens / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(&score(part, block * 16 + lane / 4 + half * 8, first + i * 8 + lane % 4 * 2)) =
            make_float2(s[i][2 * half], s[i][2 * half + 1]);
    }
  }

  __device__ float& score(int part, int row, int token) const {
    return memory_.scores[(part * kM + row) * Memory::kScoreRow + token];
  }
  // The row that this thread turns into weights, together with others of its warp.
  __device__ static int row() { return warp_id() * kWarpRows + lane_id() / kRowThreads; }

  __device__ __forceinline__ float over_row(float x, bool most) const {
#pragma unroll
    for (int mask = 1; mask < kRowThreads; mask *= 2) {
      const float other = __shfl_xor_sync(~0u, x, mask);
      x = most ? fmaxf(x, other) : x + other;
    }
    return x;
  }

  // Turns scores into weights, tokens from `left` on and those that the row does not see into zeros.
  __device__ __forceinline__ void weigh(int left) {
    const int row = this->row(), first = lane_id() % kRowThreads;
    float s[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int token = first + i * kRowThreads;
      s[i] = score(0, row, token);
      if (kParts == 2) s[i] += score(1, row, token);
      if constexpr (Variant::kCaps) cap_score(s[i], p_);
      bool hidden = token >= left;
      if constexpr (Variant::kMasks)
        hidden |= item_.draft > 0 && (hidden_from(memory_.rows.masks[row], token - (left - item_.draft)) & 1) != 0;
      if constexpr (Variant::kLimits) hidden |= Limits(left, memory_.rows.behind[row], p_).hide(token);
      if (hidden) s[i] = -INFINITY;
    }
    float higher = s[0];
#pragma unroll
    for (int i = 1; i < kOwn; ++i) higher = fmaxf(higher, s[i]);
    higher = lazy_row_max(row_max_, fmaxf(row_max_, over_row(higher, true)), p_);
    // A row that has seen nothing yet keeps weights of zero.
    const float base = higher == -INFINITY ? 0 : higher * p_.scale_log2;
    const float correction = row_max_ == higher ? 1 : weight(row_max_, higher, p_);
    row_max_ = higher, sum_ *= correction;
    if (first == 0) memory_.corrections[row] = correction;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float x = exp2_fast(s[i] * p_.scale_log2 - base);
      sum_ += x;
      reinterpret_cast<Product*>(memory_.weights + row * Memory::kWeightRow)[first + i * kRowThreads] = Product(x);
    }
  }

  // O += P V of this warp's columns.
  __device__ __forceinline__ void values(const uint8_t* tile) {
    const unsigned lane = lane_id();
    const uint32_t v = shared_address(tile), weights = shared_address(memory_.weights);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float correction[2] = {memory_.corrections[block * 16 + lane / 4],
                                   memory_.corrections[block * 16 + lane / 4 + 8]};
      rescale<kColumns / 2>(&o_[block][0][0], correction);
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        load_matrices(a[block], weights + (block * 16 + lane % 16) * Memory::kWeightRow + step * 32 + lane / 16 * 16);
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        uint32_t b[4];
        const int chunk = warp_id() * (kColumns / 8) + 2 * pair + lane / 16;
        load_matrices_transposed(b, v + panel_offset(step * 16 + lane % 16, chunk, kPanel));
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          Half<Product>::mma(o_[block][2 * pair], a[block], b[0], b[1]);
          Half<Product>::mma(o_[block][2 * pair + 1], a[block], b[2], b[3]);
        }
      }
    }
  }

  // Writes this warp's columns, through shared memory, over Q, so that threads store 16 bytes of a row side by side.
  __device__ __forceinline__ void finish() {
    const Results<T, kVDim> results(p_);
    const unsigned lane = lane_id();
    const float sum = over_row(sum_, false);
    if (lane % kRowThreads == 0) {
      const RowTarget to(memory_.rows.targets[row()]);
      memory_.norms[row()] = norm_of<Kv>(Variant::kSinks && to.used() ? sum_with_sink(sum, row_max_, to, p_) : sum, p_);
      if (to.used()) results.store_lse2(to, lse2(row_max_, sum, p_));
    }
    // Nobody multiplies Q any more either.
    __syncthreads();
    const int first = warp_id() * (kColumns / 8);
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const int row = i / 2 * 16 + lane / 4 + i % 2 * 8;
      const RowTarget to(memory_.rows.targets[row]);
      const float norm = memory_.norms[row];
#pragma unroll
      for (int chunk = 0; chunk < kColumns / 8; ++chunk) {
        const float* const o = &o_[i / 2][chunk][i % 2 * 2];
        reinterpret_cast<uint32_t*>(memory_.q + panel_offset(row, first + chunk, kQPanel))[lane % 4] =
            results.pack(to, make_float2(o[0] * norm, o[1] * norm));
      }
    }
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < kM * kColumns / 8; i += kWarpSize) {
      const int row = i / (kColumns / 8), chunk = first + i % (kColumns / 8);
      const RowTarget to(memory_.rows.targets[row]);
      if (to.used())
        results.store_packed(to, chunk * 8, *reinterpret_cast<const uint4*>(memory_.q + panel_offset(row, chunk, kQPanel)));
    }
  }

  const Params& p_;
  const Item& item_;
  Memory& memory_;
  int slot_ = 0, next_slot_ = 0;
  float row_max_ = -INFINITY, sum_ = 0;  // of this thread's `row`; the sum, of its own tokens
  float o_[kBlocks][kColumns / 8][4];
  uint4 ahead_[kConverts ? kLoads : 1];
};

// A format of forward.cuh, for query tiles of the set `kMs`. All items are wide ones there.
template <typename T, typename Kv, int kDim, int kVDim, int kMs>
struct LatentMmaKv {
  static constexpr int kThreads = kLatentMmaThreads, kItems = kLatentItems, kNarrowWarps = 1, kRecordBytes = 0;
  static constexpr int kWideMs = kMs, kNarrowMs = 0;
  static constexpr bool kLoads = false;
  static constexpr PassRegisters kRegisters = {};
  static constexpr int computing(bool) { return kThreads; }
  static constexpr int kMost = (kMs & tile_bit(kWarpgroupRows)) != 0 ? kWarpgroupRows : kNarrowM;
  static_assert((kMs & ~(tile_bit(kNarrowM) | tile_bit(kWarpgroupRows))) == 0);

  using Memory = LatentMmaMemory<kDim, kVDim, kMost>;

  static __device__ void init_barriers(const Memory&, bool) {}

  static __device__ __forceinline__ void run_wide(const Params& p, const Items<kItems>& items, Memory& memory) {
#pragma unroll 1
    for (int i = 0; i < items.count(kWide); ++i) {
      const Item& item = items.get(kWide, i);
      if (i > 0) __syncthreads();
      if (item.m == kNarrowM) {
        if constexpr ((kMs & tile_bit(kNarrowM)) != 0)
          LatentMmaItem<T, Kv, kDim, kVDim, kMost, kNarrowM>(p, item, memory).run();
      } else {
        if constexpr ((kMs & tile_bit(kWarpgroupRows)) != 0)
          LatentMmaItem<T, Kv, kDim, kVDim, kMost, kWarpgroupRows>(p, item, memory).run();
      }
    }
  }
};

}  // namespace pat
