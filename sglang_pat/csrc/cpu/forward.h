// Online softmax of one work item on the CPU: O [rows, v_head_dim] and log-sum-exp [rows] of its queries over its KV, for
// one KV head, in float32. attention.cpp calls it for each item and KV head. Scores are kept transposed, S^T [tokens,
// rows]: rows lie along vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"
#include "vec.h"

namespace pat {

struct Shape {
  int head_dim;
  int v_head_dim;
  float logit_cap;  // 0: none
};

// One KV head's view of SGLang's pools: K and V of slot s start at k + s * k_stride and v + s * v_stride.
template <typename T>
struct KvHead {
  const T* k;
  const T* v;
  int64_t k_stride;
  int64_t v_stride;
  Shape shape;

  // Whether V is the first columns of K (MLA), which are then not read a second time.
  bool latent() const { return k == v && k_stride == v_stride && shape.v_head_dim <= shape.head_dim; }

  void read(int64_t slot, float* to_k, float* to_v) const {
    convert(k + slot * k_stride, to_k, shape.head_dim);
    if (!latent()) convert(v + slot * v_stride, to_v, shape.v_head_dim);
  }
};

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Buffers of one thread. They only grow, so that a steady state allocates nothing.
struct Scratch {
  std::vector<float> q, k, v, scores, out, max, sum;
  std::vector<int32_t> begins, ends, firsts, slots;
  std::vector<uint64_t> masks;

  template <typename T>
  static T* get(std::vector<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
  }
};

// Factor on a result that was computed without its sink; 0 if neither has any weight.
inline float share_beside(float sink, float lse) { return lse == -INFINITY ? 0.0f : 1.0f / (1.0f + std::exp(sink - lse)); }

// What each row sees of an item's KV: tokens [begins[row], ends[row]), counted from the item's first; with masks, of the 64
// tokens from firsts[row] on only those whose bits are set. The arrays are padded to whole vectors of rows. Every row sees
// all of [all_begin, all_end).
struct Visible {
  const int32_t* begins;
  const int32_t* ends;
  const int32_t* firsts;
  const uint64_t* masks;  // null for none
  int all_begin, all_end;

  bool whole(int begin, int end) const { return all_begin <= begin && end <= all_end; }
};

inline Vec hide(Vec scores, const Visible& visible, int row, int token) {
  const VecInt from = load_ints(visible.begins + row), to = load_ints(visible.ends + row);
  scores = (from <= token) & (to > token) ? scores : splat(-INFINITY);
  if (!visible.masks) return scores;
  for (int i = row; i < row + kWidth; ++i) {
    const int own = token - visible.firsts[i];
    if (own >= 0 && own < 64 && !(visible.masks[i] >> own & 1)) scores[i - row] = -INFINITY;
  }
  return scores;
}

inline Vec cap(Vec scores, float limit) {
  for (int i = 0; i < kWidth; ++i) scores[i] = limit * std::tanh(scores[i] / limit);
  return scores;
}

// Online softmax of one work item's rows over one or several ranges of KV. Rows lie along vectors: S^T = K Q^T takes K as
// it lies in the pool, and the softmax runs down columns. Vectors along the head dimension were half as fast for the few
// rows of one query (benchmarks/notes/first-versions.md, "CPU executor").
class OnlineSoftmax {
 public:
  // q: [rows, head_dim], scaled already. No range will have more than `most` tokens.
  OnlineSoftmax(const Shape& shape, const float* q, int rows, int most, Scratch& scratch)
      : shape_(shape),
        rows_(rows),
        block_(std::min(most, kBlock)),
        ldr_(round_up(rows, kWidth)),
        ldv_(round_up(shape.v_head_dim, kWidth)) {
    const int d = shape.head_dim;
    qt_ = Scratch::get(scratch.q, size_t(d) * ldr_);
    k_ = Scratch::get(scratch.k, size_t(block_) * d + kWidth);  // latents: a row's last vector of V may reach behind K
    v_ = Scratch::get(scratch.v, size_t(block_) * ldv_);
    scores_ = Scratch::get(scratch.scores, size_t(block_) * ldr_);
    out_ = Scratch::get(scratch.out, size_t(rows) * ldv_);
    max_score_ = Scratch::get(scratch.max, ldr_);
    sum_exp_ = Scratch::get(scratch.sum, ldr_);
    std::fill_n(qt_, size_t(d) * ldr_, 0.0f);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < d; ++i) qt_[size_t(i) * ldr_ + r] = q[size_t(r) * d + i];
    std::fill_n(out_, size_t(rows) * ldv_, 0.0f);
    // Of columns that are no V's: they are computed too.
    if (ldv_ != shape.v_head_dim) std::fill_n(v_, size_t(block_) * ldv_, 0.0f);
    std::fill_n(max_score_, ldr_, -INFINITY);
    std::fill_n(sum_exp_, ldr_, 0.0f);
  }

  // Adds `length` tokens, in these slots of `kv`, from position `first` on; `visible` counts from there. Blocks end where positions are multiples of
  // kBlock: so a row's sums do not depend on where its window lets a work item begin.
  template <typename Source>
  void add(const Source& kv, const int32_t* slots, int32_t first, int length, const Visible& visible) {
    const int d = shape_.head_dim;
    const bool latent = kv.latent();
    for (int begin = 0, n; begin < length; begin += n) {
      n = std::min(kBlock - (first + begin) % kBlock, length - begin);
      for (int j = 0; j < n; ++j) {
        kv.read(slots[begin + j], k_ + size_t(j) * d, v_ + size_t(j) * ldv_);
      }
      std::fill_n(scores_, size_t(n) * ldr_, 0.0f);
      gemm(k_, d, 1, qt_, ldr_, scores_, ldr_, n, ldr_, d);
      const bool whole = visible.whole(begin, begin + n);
      for (int r = 0; r < ldr_; r += kWidth) {
        const Vec before = load(max_score_ + r);
        Vec now = before;
        for (int j = 0; j < n; ++j) {
          Vec s = load(scores_ + size_t(j) * ldr_ + r);
          if (shape_.logit_cap > 0) s = cap(s, shape_.logit_cap);
          if (!whole) s = hide(s, visible, r, begin + j);
          if (shape_.logit_cap > 0 || !whole) store(scores_ + size_t(j) * ldr_ + r, s);
          now = max(now, s);
        }
        store(max_score_ + r, now);
        // A row that has seen nothing yet has a maximum of -inf; -inf minus -inf would be NaN.
        if (!whole) now = now == splat(-INFINITY) ? Vec{} : now;
        const Vec rescale = exp_nonpositive(before - now);
        Vec total = load(sum_exp_ + r) * rescale;
        for (int j = 0; j < n; ++j) {
          const Vec p = exp_nonpositive(load(scores_ + size_t(j) * ldr_ + r) - now);
          store(scores_ + size_t(j) * ldr_ + r, p);
          total += p;
        }
        store(sum_exp_ + r, total);
        for (int i = r; i < std::min(r + kWidth, rows_); ++i)
          if (rescale[i - r] != 1.0f)
            for (int c = 0; c < ldv_; c += kWidth)
              store(out_ + size_t(i) * ldv_ + c, load(out_ + size_t(i) * ldv_ + c) * rescale[i - r]);
      }
      gemm(scores_, 1, ldr_, latent ? k_ : v_, latent ? d : ldv_, out_, ldv_, rows_, ldv_, n);
    }
  }

  // out[rows, v_head_dim] is normalised; lse[rows] is -inf for rows that saw no KV.
  void finish(float* out, float* lse) const {
    const int dv = shape_.v_head_dim;
    for (int r = 0; r < rows_; ++r) {
      const bool seen = sum_exp_[r] != 0;  // also where it is NaN
      const float norm = seen ? 1.0f / sum_exp_[r] : 0.0f;
      for (int i = 0; i < dv; ++i) out[size_t(r) * dv + i] = out_[size_t(r) * ldv_ + i] * norm;
      lse[r] = seen ? max_score_[r] + std::log(sum_exp_[r]) : -INFINITY;
    }
  }

 private:
  const Shape shape_;
  // Tokens at a time, as many as `CPU_TILES.kv_tile`; measured with 128 dimensions (benchmarks/notes/first-versions.md, "CPU executor").
  static constexpr int kBlock = 128;

  const int rows_, block_, ldr_, ldv_;  // ldr_: floats between rows of S^T and Q^T; ldv_: of V and O
  float *qt_, *k_, *v_, *scores_, *out_, *max_score_, *sum_exp_;
};

}  // namespace pat
