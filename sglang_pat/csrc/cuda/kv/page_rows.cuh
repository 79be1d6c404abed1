// Narrow work items over pages of 4 or 2 bits: the loop of plain_narrow.cuh, with products of codes (page_record.cuh). K's
// scales are folded into Q once a page, V's into the weights. K's zeros give one summand for all tokens of a page; V's are
// summed by weight beside the products. The 16-bit tokens behind the last full page come last in an item; before them, or at its end,
// O is turned from sums of codes into values (`decode_results`). Q and O lie as in narrow_rows.cuh. page.cuh runs it.
#pragma once

#include "../narrow_rows.cuh"
#include "page_load.cuh"

namespace pat {

template <typename T, typename Kv, int kDim, int kM>
class PageWarp : NarrowRows<T, Kv, kDim, kDim, kM, kPageWarps, PageLoader<Kv, kDim, kM>> {
  using Loader = PageLoader<Kv, kDim, kM>;
  using Rows = NarrowRows<T, Kv, kDim, kDim, kM, kPageWarps, Loader>;
  using Loader::at_page, Loader::copy_next, Loader::ended, Loader::item, Loader::last, Loader::look_up;
  using Loader::next_item, Loader::next_stage, Loader::p_, Loader::shared, Loader::stage, Loader::step_of;
  using Rows::kBlocks, Rows::kSteps;
  using Rows::reduce_team, Rows::load_q, Rows::o_, Rows::q_, Rows::softmax_, Rows::write;
  using typename Loader::Cursor, typename Loader::S;
  using R = typename S::R;
  using Product = Half<typename Kv::Product>;
  static constexpr int kChunks = kTokens / kStepTokens;
  using Scores = float[kChunks][kBlocks][4];

 public:
  using Rows::Rows;

  // Each iteration computes a chunk: a page, or 16 tokens of a tail. At its top:
  //
  //   reader    the chunk that is looked up next, one past the last one whose copy was issued
  //   wanted    empty stages, so copies to issue; each is a commit group, also where no chunk is left
  //   copied    the stage that the next copy fills
  //   user      the chunk that is computed next, its item's Q in q_; at = -1 before the first
  //   used      the stage that it is in
  //   computed  all chunks of the user's item are computed, its results not yet written
  //   decoded   O is values, no longer sums of codes
  __device__ void run() {
    Cursor reader, user;
    next_item(reader);
    look_up(reader);
    int copied = 0, wanted = S::kStages, used = 0;
    bool computed = true, decoded = true;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; wanted > 0; --wanted) copy_next(reader, copied);
      if (!decoded && (computed || !at_page(user))) decode_results(), decoded = true;
      if (computed) {
        if (user.at >= 0) {
          softmax_.finish();
          if (shared(user))
            reduce_team(item(user), used), wanted = 1;
          else
            write(item(user));
          used = next_stage(used);
        }
        next_item(user);
        if (ended(user)) break;
        load_q(item(user), q_);
        softmax_ = ColumnSoftmax<kBlocks>();
#pragma unroll
        for (int i = 0; i < kSteps * kBlocks * 4; ++i) (&o_[0][0][0])[i] = 0;
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) zero_[i / 2][i % 2] = 0;
        computed = decoded = false;
        continue;
      }
      wait_copies<S::kStages - 1>();
      __syncwarp();
      const uint8_t* const from = stage(warp_id(), used);
      if (at_page(user))
        compute_page(from);
      else if (user.left > 0)
        compute_tail(shared_address(from), user.left);
      __syncwarp();
      computed = last(user);
      // The team merges in the stage of the item's last chunk.
      wanted = int(!computed || !shared(user));
      if (computed) continue;
      user.left -= step_of(user);
      used = next_stage(used);
    }
    wait_copies<0>();
  }

 private:
  static __device__ __forceinline__ uint4 load(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }

  // Turns scores S into weights P.
  template <int kCount>
  __device__ __forceinline__ void update(float (&s)[kCount][kBlocks][4], int tokens, float (&correction)[kBlocks][2]) {
    const auto none = [](int) { return 0; };
    softmax_.template update<kCount>(s, tokens, tokens, 0, none, false, none, p_, correction);
  }

  __device__ __forceinline__ void compute_page(const uint8_t* from) {
    Scores s;
    score(from, s);
    float correction[kBlocks][2];
    update(s, kTokens, correction);
    add_values(from, s, correction);
  }

  using Scaled = uint32_t[kSteps][kBlocks][2];                               // Q times K's scales
  using Sums = float[kBlocks][4];                                            // the same for all tokens of a page
  static constexpr uint32_t kOnePair = 0x3c003c00, kSmallPair = 0x1c001c00;  // __half 1 and 2^-8, each twice

  // Overflow path: where Q times K's scale exceeds __half, the row's sum `bases` has an infinity. That row is computed
  // again 2^16 too small: both factors are in range, so their scaled product is too. Sums of codes (around 1,024) round in
  // float32: such a score errs by about 1e-7 of 1,024 |Q| times the scale. Returns a bit for each row whose scores this
  // thread has.
  __device__ __forceinline__ unsigned scale_down(const uint8_t* from, Scaled& scaled, Sums& zeros, Sums& bases) const {
    const uint32_t minus[4] = {kMinusCodeBase, kMinusCodeBase, kMinusCodeBase, kMinusCodeBase};
    unsigned beyond = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = lane_id() / 4;
      uint32_t factor = kOnePair;  // of the row of Q that this thread has
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_beyond = !(fabsf(bases[block][i]) < INFINITY);
        const unsigned rows = __ballot_sync(~0u, is_beyond);
        if (row % 2 == i && rows >> row / 2 & 1) factor = kSmallPair;
        if (is_beyond) beyond |= 1u << (2 * block + i), zeros[block][i] *= 0x1p-16f;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) bases[block][i] = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 scale = *reinterpret_cast<const uint2*>(from + step / 2 * R::kKeyUnit + thread_of<4>() * R::kKeyColumn +
                                                            step % 2 * R::kKeyStep);
        uint32_t (&to)[2] = scaled[step][block];
        to[0] = multiply_pair(multiply_pair(q_.pairs[step][block][0], factor), multiply_pair(scale.x, factor));
        to[1] = multiply_pair(multiply_pair(q_.pairs[step][block][1], factor), multiply_pair(scale.y, factor));
        Product::mma(bases[block], minus, to[0], to[1]);
      }
    }
    return beyond;
  }

  // S^T = K Q^T of a page.
  __device__ __forceinline__ void score(const uint8_t* from, Scores& s) const {
    Scaled scaled;
    Sums zeros = {}, bases = {};
    const uint32_t minus[4] = {kMinusCodeBase, kMinusCodeBase, kMinusCodeBase, kMinusCodeBase};
    const int column = thread_of<4>() * R::kKeyColumn;
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      const uint4 scale = load(from + i / 2 * R::kKeyUnit + column);
      const uint4 zero = load(from + R::kKeyZeros + i / 2 * R::kKeyUnit + column);
      const uint32_t scales[2][2] = {{scale.x, scale.y}, {scale.z, scale.w}};
      const uint32_t pairs[2][2] = {{zero.x, zero.y}, {zero.z, zero.w}};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {pairs[j][0], pairs[j][0], pairs[j][1], pairs[j][1]};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint32_t (&q)[2] = q_.pairs[i + j][block];
          uint32_t (&to)[2] = scaled[i + j][block];
          to[0] = multiply_pair(q[0], scales[j][0]), to[1] = multiply_pair(q[1], scales[j][1]);
          Product::mma(zeros[block], a, q[0], q[1]);
          Product::mma(bases[block], minus, to[0], to[1]);
        }
      }
    }
    unsigned beyond = 0;
    float sum = 0;  // of the rows whose scores this thread has
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) sum += bases[i / 2][i % 2];
    if (__any_sync(~0u, !(fabsf(sum) < INFINITY))) beyond = scale_down(from, scaled, zeros, bases);
#pragma unroll
    for (int i = 0; i < kChunks * kBlocks * 4; ++i)
      (&s[0][0][0])[i] = zeros[i / 4 % kBlocks][i % 2] + bases[i / 4 % kBlocks][i % 2];
#pragma unroll
    for (int unit = 0; unit < R::kUnits; ++unit) {
      uint32_t words[kChunks][R::kUnit];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) R::load_words(words[chunk], from + R::kKeyCodes, chunk, unit);
#pragma unroll
      for (int i = 0; i < R::kUnit * R::kWordSteps; ++i) {
        const int step = unit * R::kUnit * R::kWordSteps + i;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          uint32_t a[4];
          R::key_operand(a, words[chunk][i / R::kWordSteps], i % R::kWordSteps);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            Product::mma(s[chunk][block], a, scaled[step][block][0], scaled[step][block][1]);
        }
      }
    }
    if (beyond == 0) return;  // else those rows are 2^16 too small
#pragma unroll
    for (int i = 0; i < kChunks * kBlocks * 4; ++i)
      if (beyond >> (i / 4 % kBlocks * 2 + i % 2) & 1) (&s[0][0][0])[i] *= 0x1p16f;
  }

  // O^T += V^T P^T of a page.
  __device__ __forceinline__ void add_values(const uint8_t* from, const Scores& weights,
                                             const float (&correction)[kBlocks][2]) {
    const uint8_t* const own = from + R::kValueParameters + unsigned(lane_id()) / 4 * R::kValueRow;
    const uint4 low = load(own), high = load(own + 16);
    const uint32_t parameters[kChunks][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    uint32_t b[kChunks][kBlocks][2];
    Sums bases = {};
    const uint32_t minus[4] = {kMinusCodeBase, kMinusCodeBase, kMinusCodeBase, kMinusCodeBase};
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) zero_[i / 2][i % 2] *= correction[i / 2][i % 2];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Scale and zero of this thread's token.
          const float2 parameter = to_floats(parameters[chunk][half]);
          const float* const two = &weights[chunk][block][2 * half];
          zero_[block][0] += two[0] * parameter.y, zero_[block][1] += two[1] * parameter.y;
          // Saturate: weights reach 2^8 (`kSlack`), and a scale may reach the range of __half.
          b[chunk][block][half] = transpose(saturated_half_pair(two[0] * parameter.x, two[1] * parameter.x));
        }
        Product::mma(bases[block], minus, b[chunk][block][0], b[chunk][block][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps * kBlocks * 4; ++i) {
      float& o = (&o_[0][0][0])[i];
      o = o * correction[i / 4 % kBlocks][i % 2] + bases[i / 4 % kBlocks][i % 2];
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int unit = 0; unit < R::kUnits; ++unit) {
        uint32_t words[R::kUnit];
        R::load_words(words, from + R::kValueCodes, chunk, unit);
#pragma unroll
        for (int i = 0; i < R::kUnit * R::kWordSteps; ++i) {
          uint32_t a[4];
          R::value_operand(a, words[i / R::kWordSteps], i % R::kWordSteps);
          const int step = unit * R::kUnit * R::kWordSteps + i;
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
            Product::mma(o_[step][block], a, b[chunk][block][0], b[chunk][block][1]);
        }
      }
    }
  }

  // Turns O from sums of codes into values.
  __device__ __forceinline__ void decode_results() {
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      float& zero = zero_[i / 2][i % 2];
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) zero += __shfl_xor_sync(~0u, zero, mask);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        float& o = o_[step][i / 4][i % 4];
        o = o * (1.0f / R::result_factor(step, i % 4 / 2)) + zero_[i / 4][i % 2];
      }
  }

  // Converts an operand from T to the type of the products.
  static __device__ __forceinline__ void convert(uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = convert_pair<T, typename Kv::Product>(a[i]);
  }

  // Computes up to 16 tokens of a tail in 16 bits; `tokens` are left.
  __device__ __forceinline__ void compute_tail(uint32_t from, int tokens) {
    float s[1][kBlocks][4] = {};
    const unsigned lane = lane_id();
    const uint32_t k = from + panel_offset(lane % 16, lane / 16, S::kPanel);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_matrices(a, next_step(k, step, S::kPanel));
      convert(a);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        Product::mma(s[0][block], a, q_.pairs[step][block][0], q_.pairs[step][block][1]);
    }
    float correction[kBlocks][2];
    update(s, tokens, correction);
    uint32_t b[kBlocks][2];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      b[block][0] = transpose(Product::pack(s[0][block][0], s[0][block][1]));
      b[block][1] = transpose(Product::pack(s[0][block][2], s[0][block][3]));
    }
    const uint32_t v = from + S::kTile + panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, S::kPanel);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_matrices_transposed(a, next_step(v, step, S::kPanel));
      convert(a);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[step][block][i] *= correction[block][i % 2];
        Product::mma(o_[step][block], a, b[block][0], b[block][1]);
      }
    }
  }

  float zero_[kBlocks][2] = {};  // sums of V's zeros by weight, over this thread's tokens
};

}  // namespace pat
