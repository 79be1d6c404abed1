// A tile by mma.sync, for any architecture: the warps share its rows where there are enough, else its tokens.
#pragma once

#include "results.cuh"
#include "softmax.cuh"

namespace pat {

template <typename T, int kDim, int kTokens, int kM>
class MmaTile {
  static constexpr int kRowWarps = std::min(kWarps, kM / 16);
  static constexpr int kTokenWarps = std::min(kWarps / kRowWarps, kTokens / 16);
  static constexpr int kRowBlocks = kM / 16 / kRowWarps;  // of 16 rows, for each warp
  static constexpr int kOwn = kTokens / kTokenWarps;      // tokens of a tile that a warp computes
  static constexpr int kBlocks = kOwn / 8;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kPanel = kTokens * kPanelRow, kQPanel = kM * kPanelRow;
  static constexpr bool kKeepQ = kRowBlocks == 1;  // in registers

 public:
  // Statistics of the warps that share rows.
  struct Shared {
    float top[kWarps][16], sum[kWarps][16];
  };

  __device__ MmaTile(int thread, uint32_t q, float* scratch, Shared& shared, const Params& p)
      : thread_(thread), q_(q), scratch_(scratch), shared_(shared), p_(p) {}

  // Q is in shared memory.
  __device__ void begin() {
    if constexpr (kKeepQ) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q(q_registers_[step], step, 0);
    }
  }

  __device__ void scores(uint32_t k, int tokens) {
    if (idle(tokens)) return;
#pragma unroll
    for (int i = 0; i < kRowBlocks * kBlocks * 4; ++i) (&s_[0][0])[i] = 0;
    const int row = token_warp() * kOwn + lane() % 8 + lane() / 16 * 8, chunk = lane() / 8 % 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t q[kRowBlocks][4];
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        if constexpr (!kKeepQ) load_q(q[block], step, block);
      }
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        uint32_t b[4];
        load_matrices(b, k + panel_offset(row + pair * 16, 2 * step + chunk, kPanel));
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          const uint32_t(&a)[4] = kKeepQ ? q_registers_[step] : q[block];
          Half<T>::mma(score(block, 2 * pair), a, b[0], b[1]);
          Half<T>::mma(score(block, 2 * pair + 1), a, b[2], b[3]);
        }
      }
    }
  }

  __device__ void weights(int tokens) {
    if (idle(tokens)) return;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      float factor[2];
      softmax_[block].template update<kBlocks>(s_[block], token_warp() * kOwn, tokens, p_, factor);
      if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) continue;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o_[block][i][j] *= factor[j / 2];
      }
    }
  }

  __device__ void values(uint32_t v, int tokens) {
    if (idle(tokens)) return;
    const int row = token_warp() * kOwn + lane() % 16, chunk = lane() / 16;
#pragma unroll
    for (int step = 0; step < kOwn / 16; ++step) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) pack_weights<T>(a[block], score(block, 2 * step));
#pragma unroll
      for (int pair = 0; pair < kDim / 16; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(b, v + panel_offset(row + step * 16, 2 * pair + chunk, kPanel));
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          Half<T>::mma(o_[block][2 * pair], a[block], b[0], b[1]);
          Half<T>::mma(o_[block][2 * pair + 1], a[block], b[2], b[3]);
        }
      }
    }
  }

  // The memory of V is free when this returns in all warps.
  __device__ void values_end(int) {}

  __device__ void finish(const Results<T, kDim>& results) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) softmax_[block].finish();
    if constexpr (kTokenWarps > 1)
      combine(results);
    else
      write(results);
  }

 private:
  __device__ int lane() const { return thread_ % 32; }
  __device__ int warp() const { return thread_ / 32; }
  __device__ int row_warp() const { return warp() % kRowWarps; }
  __device__ int token_warp() const { return warp() / kRowWarps; }
  // Whether none of a tile's tokens is this warp's.
  __device__ bool idle(int tokens) const {
    return token_warp() >= kTokenWarps || (kTokenWarps > 1 && token_warp() * kOwn >= tokens);
  }

  __device__ float (&score(int block, int column))[4] { return reinterpret_cast<float(&)[4]>(s_[block][4 * column]); }

  __device__ void load_q(uint32_t (&q)[4], int step, int block) const {
    const int row = (row_warp() * kRowBlocks + block) * 16 + lane() % 16;
    load_matrices(q, q_ + panel_offset(row, 2 * step + lane() / 16, kQPanel));
  }

  __device__ void write(const Results<T, kDim>& results) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto to = results.row((row_warp() * kRowBlocks + block) * 16 + lane() / 4 + half * 8);
        const float sum = softmax_[block].sum[half], norm = sum > 0 ? 1 / sum : 0;
        if (lane() % 4 == 0) results.store_lse(to, lse(softmax_[block].top[half], sum, p_));
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i)
          results.store(to, i * 8 + lane() % 4 * 2, o_[block][i][2 * half] * norm, o_[block][i][2 * half + 1] * norm);
      }
    }
  }

  // Sums what the warps have that share rows. Chunks of eight columns are permuted by the row: no bank conflicts.
  __device__ void combine(const Results<T, kDim>& results) {
    if (token_warp() < kTokenWarps) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane() / 4 + half * 8;
        if (lane() % 4 == 0) {
          shared_.top[warp()][row] = softmax_[0].top[half];
          shared_.sum[warp()][row] = softmax_[0].sum[half];
        }
        if (softmax_[0].top[half] == -INFINITY) continue;  // its weight will be zero, and it is not read
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i)
          *reinterpret_cast<float2*>(scratch_ + place(warp(), row, i * 8 + lane() % 4 * 2)) =
              make_float2(o_[0][i][2 * half], o_[0][i][2 * half + 1]);
      }
    }
    __syncthreads();
    constexpr int kThreadsPerRow = 8, kColumns = 4 * kThreadsPerRow;
#pragma unroll
    for (int row = thread_ / kThreadsPerRow; row < kM; row += kThreads / kThreadsPerRow) {
      float top = -INFINITY, sum = 0, factor[kTokenWarps];
#pragma unroll
      for (int i = 0; i < kTokenWarps; ++i) top = fmaxf(top, shared_.top[row / 16 + i * kRowWarps][row % 16]);
#pragma unroll
      for (int i = 0; i < kTokenWarps; ++i) {
        const int of = row / 16 + i * kRowWarps;
        const float own = shared_.top[of][row % 16];
        factor[i] = own == -INFINITY ? 0 : exp2_fast((own - top) * p_.scale_log2);
        sum += factor[i] * shared_.sum[of][row % 16];
      }
      const auto to = results.row(row);
      const int column = thread_ % kThreadsPerRow * 4;
      const float norm = sum > 0 ? 1 / sum : 0;
      if (column == 0) results.store_lse(to, lse(top, sum, p_));
#pragma unroll
      for (int i = 0; i < kDim / kColumns; ++i) {
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < kTokenWarps; ++j) {
          if (factor[j] == 0) continue;
          const float4 x = *reinterpret_cast<const float4*>(
              scratch_ + place(row / 16 + j * kRowWarps, row % 16, i * kColumns + column));
          const float weight = factor[j] * norm;
          total.x += x.x * weight, total.y += x.y * weight, total.z += x.z * weight, total.w += x.w * weight;
        }
        results.store(to, i * kColumns + column, total);
      }
    }
  }

  __device__ static int place(int warp, int row, int column) {
    return (warp * 16 + row) * kDim + (column ^ (row % 8 * 8));
  }

  const int thread_;
  const uint32_t q_;
  float* const scratch_;
  Shared& shared_;
  const Params& p_;
  Softmax softmax_[kRowBlocks];
  uint32_t q_registers_[kKeepQ ? kSteps : 1][4];
  float s_[kRowBlocks][kBlocks * 4];
  float o_[kRowBlocks][kDim / 8][4] = {};
};

}  // namespace pat
