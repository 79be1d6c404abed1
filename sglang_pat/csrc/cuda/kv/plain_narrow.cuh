// Narrow work items: O = softmax(Q K^T) V of query tiles of 8 or 16 rows, which are memory-bound and many. Each warp
// copies, computes and writes for itself, without barriers: 32 tokens at a time where registers suffice, while later ones
// are in flight, also across the ends of items. A short item is one warp's. A long one is a team's: its warps alternate
// over its chunks and merge at the end, while the copies for the next item run on. plain.cuh runs it; page_rows.cuh does
// the same for pages.
//
// The matrix products are transposed, S^T = K Q^T and O^T = V^T P^T. The 16 rows of an mma.sync are tokens, or columns of
// the head, of which there are always enough; its 8 columns are rows of Q, of which there are few.
//
// 8-bit KV is converted in registers. A register that ldmatrix fills then has four bytes, operands of two k16 steps, so
// columns of the head come in another order:
//
//   product      a thread has        16 bits                      8 bits
//   K Q^T        of Q, in a step     columns 2 t, 2 t + 1,        columns 4 t to 4 t + 3
//                                    8 + 2 t, 9 + 2 t
//   V^T P^T      of O, in a step     columns g, 8 + g             columns 2 g, 2 g + 1
//
// with t = lane % 4 and g = lane / 4.
#pragma once

#include "../narrow_rows.cuh"
#include "plain_load.cuh"

namespace pat {

// One warp's consumer and producer for tiles of `kM` rows of Q.
template <typename T, typename Kv, int kDim, int kVDim, int kM, int kWarps>
class NarrowWarp : NarrowRows<T, Kv, kDim, kVDim, kM, kWarps, NarrowLoader<Kv, kDim, kVDim, kM, kWarps>> {
  using Loader = NarrowLoader<Kv, kDim, kVDim, kM, kWarps>;
  using Rows = NarrowRows<T, Kv, kDim, kVDim, kM, kWarps, Loader>;
  using Loader::copy_next, Loader::ended, Loader::item, Loader::next_item, Loader::next_stage, Loader::read_slots;
  using Loader::kChunkTokens, Loader::kPairs, Loader::kKind, Loader::kReadAhead, Loader::kSlotsAhead, Loader::kTwoSteps;
  using Loader::shared, Loader::stage;
  using Loader::user_, Loader::items_, Loader::p_;
  using Rows::kBlocks, Rows::kIs8Bit, Rows::kLooksUpRows, Rows::kSteps, Rows::kVSteps;
  using Rows::reduce_team, Rows::load_q, Rows::write, Rows::softmax_, Rows::q_, Rows::next_q_, Rows::o_;
  using typename Loader::Cursor, typename Loader::S, typename Loader::WorkItems, typename Rows::Queries;
  using Product = Half<typename Kv::Product>;
  static constexpr int kLoadSteps = 2 / Kv::kBytes;  // k16 steps whose left operands one ldmatrix loads

 public:
  using Rows::Rows;

  // Each iteration computes a chunk, or a pair of them. At its top:
  //
  //   reader     the chunk whose slots are loaded next, kSlotsAhead chunks past the last one whose copy was issued
  //   ahead_     those chunks, with their slots
  //   wanted     empty stages, so copies to issue; the others are full or in flight. Each copy is a commit group, also
  //              where no chunk is left: the oldest of kNarrowStages groups is the user's chunk
  //   copied     the stage that the next copy fills
  //   user       the chunk that is computed next, its item's Q in q_; at = -1 before the first
  //   used       the stage that it is in
  //   following  the item after the user's, its Q in next_q_ (with kReadAhead)
  //   computed   all chunks of the user's item are computed, its results not yet written
  //
  // Keep one copy of each large block: the instruction cache is cold at launch.
  __device__ void run() {
    Cursor reader, user, following;
    next_item(reader);
    int copied = 0, wanted = kNarrowStages, used = 0;
    bool computed = true;
#pragma unroll 1
    for (int i = 0; i < kSlotsAhead; ++i) read_slots(reader);
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; wanted > 0; --wanted) copy_next(reader, copied);
      if (computed) {
        if (user.at >= 0) {
          softmax_.finish();
          if (shared(user))
            reduce_team(item(user), used), wanted = 1;
          else
            write(item(user));
          used = next_stage(used);
        }
        if constexpr (kReadAhead) {
          // The first time this loads Q of two items.
#pragma unroll 1
          do {
            user = following;
            next_item(following);
#pragma unroll
            for (int i = 0; i < kSteps * kBlocks * 2; ++i) (&q_.pairs[0][0][0])[i] = (&next_q_.pairs[0][0][0])[i];
            if (!ended(following)) load_q(item(following), next_q_);
          } while (user.at < 0);
          if (ended(user)) break;
        } else {
          next_item(user);
          if (ended(user)) break;
          load_q(item(user), q_);
        }
        softmax_ = ColumnSoftmax<kBlocks>();
        if constexpr (Variant::kMasks) user_ = user.at;
        if constexpr (Variant::kLimits && !Variant::kMasks) behind_ = behind_of(item(user), lane_id() % kM);
#pragma unroll
        for (int i = 0; i < kVSteps * kBlocks * 4; ++i) (&o_[0][0][0])[i] = 0;
        computed = false;
        if (wanted > 0) continue;
      }
      const bool pair = kPairs && !user.last();
      const uint32_t first = shared_address(stage(warp_id(), used));
      if (kPairs && pair) {
        wait_copies<kNarrowStages - 2>();
        __syncwarp();
        used = next_stage(used);
        const uint32_t second = shared_address(stage(warp_id(), used));
        if constexpr (kPairs) compute<2>(first, second, user.left, user.step);
        user.left -= user.step;
      } else {
        wait_copies<kNarrowStages - 1>();
        __syncwarp();
        compute_chunk(first, user.left);
      }
      __syncwarp();
      computed = user.last();
      // The team merges in the stage of the item's last chunk; the one before is free.
      wanted = int(pair) + int(!computed || !shared(user));
      if (computed) continue;
      user.left -= user.step;
      used = next_stage(used);
    }
    wait_copies<0>();
  }

 private:
  // Left operands of one k16 step, or of two with 8-bit KV.
  using Operands = uint32_t[kLoadSteps][4];
  static __device__ __forceinline__ void load_k(Operands& a, uint32_t from) {
    if constexpr (kIs8Bit) {
      uint32_t bytes[4];
      load_matrices(bytes, from);
#pragma unroll
      for (int i = 0; i < 4; ++i) Kv::adjacent(bytes[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
    } else {
      load_matrices(a[0], from);
    }
  }
  static __device__ __forceinline__ void load_v(Operands& a, uint32_t from) {
    if constexpr (kIs8Bit) {
      uint32_t bytes[4];
      load_matrices_transposed(bytes, from);
#pragma unroll
      for (int i = 0; i < 4; ++i) Kv::interleaved(bytes[i], a[i % 2][i / 2 * 2], a[i % 2][i / 2 * 2 + 1]);
    } else {
      load_matrices_transposed(a[0], from);
    }
  }

  // `tokens_behind` of a row; for rows that only pad, that of the first.
  __device__ int behind_of(const Item& item, int row) const {
    if (row >= item.count * p_.group) row = 0;
    return tokens_behind(p_, item, row, query_of(p_, item, p_.query_of(row)));
  }

  // Whether masking is needed: some row does not see all of a chunk. `first` tokens are left from the chunk's start, `last`
  // from its last k16 step. In a draft only windows can hide something, and they begin fewer than `draft` tokens apart.
  __device__ bool hides_some(int first, int last) const {
    if constexpr (Variant::kMasks) return items_.get(kKind, user_).tokens - first < p_.draft;
    return __any_sync(~0u, Limits(first, behind_, p_).hide_some(0) || Limits(last, behind_, p_).hide_some(kStepTokens));
  }

  // One or two KV tiles of 16 tokens: K and V at `first` and `second`. `tokens` are left from the first on; the second
  // begins `step` further.
  template <int kChunks>
  __device__ __forceinline__ void compute(uint32_t first, uint32_t second, int tokens, int step) {
    float s[kChunks][kBlocks][4] = {};
    const unsigned lane = lane_id();
    const uint32_t k = panel_offset(lane % 16, lane / 16, S::kPanel);
#pragma unroll
    for (int i = 0; i < kSteps; i += kLoadSteps) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint32_t a[kLoadSteps][4];
        load_k(a, next_step((chunk == 0 ? first : second) + k, i / kLoadSteps, S::kPanel));
#pragma unroll
        for (int j = 0; j < kLoadSteps; ++j)
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            Product::mma(s[chunk][block], a[j], q_.pairs[i + j][block][0], q_.pairs[i + j][block][1]);
      }
    }
    float correction[kBlocks][2];
    const int draft = Variant::kMasks ? items_.get(kKind, user_).draft : 0;
    const auto mask = [&](int row) {
      if constexpr (kLooksUpRows)
        return __shfl_sync(~0u, q_.mask, row);
      else
        return mask_of(p_, items_.get(kKind, user_), row);
    };
    const auto behind = [&](int row) {
      return Variant::kMasks ? behind_of(items_.get(kKind, user_), row) : __shfl_sync(~0u, behind_, row);
    };
    const bool some = Variant::kLimits && hides_some(tokens, kChunks == 2 ? tokens - step : tokens);
    softmax_.template update<kChunks>(s, tokens, tokens - step, draft, mask, some, behind, p_, correction);
    bool same = true;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) same = same && correction[block][0] == 1 && correction[block][1] == 1;
    if (__any_sync(~0u, !same)) {
#pragma unroll
      for (int i = 0; i < kVSteps * kBlocks * 4; ++i) (&o_[0][0][0])[i] *= correction[i / 4 % kBlocks][i % 2];
    }
    const uint32_t v = S::kTile + panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, S::kPanel);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t b[kBlocks][2];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        b[block][0] = transpose(Product::pack(s[chunk][block][0], s[chunk][block][1]));
        b[block][1] = transpose(Product::pack(s[chunk][block][2], s[chunk][block][3]));
      }
#pragma unroll
      for (int i = 0; i < kVSteps; i += kLoadSteps) {
        uint32_t a[kLoadSteps][4];
        load_v(a, next_step((chunk == 0 ? first : second) + v, i / kLoadSteps, S::kPanel));
#pragma unroll
        for (int j = 0; j < kLoadSteps; ++j)
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) Product::mma(o_[i + j][block], a[j], b[block][0], b[block][1]);
      }
    }
  }

  // A chunk at `from`, from whose first token on `tokens` are left.
  __device__ __forceinline__ void compute_chunk(uint32_t from, int tokens) {
    if constexpr (kChunkTokens == kStepTokens) {
      compute<1>(from, from, tokens, 0);
    } else if constexpr (kTwoSteps) {
      if (tokens > kStepTokens)
        compute<2>(from, from + kStepTokens * kPanelRow, tokens, kStepTokens);
      else
        compute<1>(from, from, tokens, 0);
    } else {
      // Masks and limits count from the item's end, so `tokens` may not be cut there.
      constexpr bool kFromEnd = Variant::kMasks || Variant::kLimits;
      if constexpr (!kFromEnd) tokens = min(tokens, kChunkTokens);
      const int behind = kFromEnd ? max(0, tokens - kChunkTokens) : 0;
#pragma unroll 1
      do {
        compute<1>(from, from, tokens, 0);
        tokens -= kStepTokens, from += kStepTokens * kPanelRow;
      } while (tokens > behind);
    }
  }

  int behind_ = 0;  // with Variant::kLimits and no kMasks: `tokens_behind` of row lane % kM
};

}  // namespace pat
