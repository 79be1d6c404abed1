// Attention of one work item's queries over its KV positions, for one KV head.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"
#include "vec.h"

namespace pat {

// One KV head's view of SGLang's pools: K and V of slot s start at k + s * k_stride and v + s * v_stride.
template <typename T>
struct KvHead {
  const T* k;
  const T* v;
  int64_t k_stride;
  int64_t v_stride;
};

struct Shape {
  int head_dim;
  int v_head_dim;
  float logit_cap;  // 0: none
};

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Grows to the largest request of its thread and stays, so that a steady state allocates nothing.
struct Scratch {
  std::vector<float> q, k, v, scores, out, max, sum;
  std::vector<int32_t> begins, ends, firsts;
  std::vector<uint64_t> masks;

  template <typename T>
  static T* get(std::vector<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
  }
};

// By what a result without a sink is to be multiplied, which has one; 0 where both are nothing.
inline float share_beside(float sink, float lse) { return lse == -INFINITY ? 0.0f : 1.0f / (1.0f + std::exp(sink - lse)); }

// Results of `rows` rows: out[row, v_head_dim] is normalised, lse is -inf where there was no KV.
struct Result {
  float* out;
  float* lse;
};

// Which of an item's KV each row sees: [begins[row], ends[row]), counted from the item's first token; where there are masks, of the 64
// tokens from firsts[row] on those whose bits are set. All have room for whole vectors of rows. All rows see [all_begin, all_end).
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

// Rows lie along vectors: S^T = K Q^T needs K as it comes from the pool, and softmax runs down columns. `q` is
// [rows, head_dim], scaled. For one query's few rows, vectors along the head dimension were half as fast
// (benchmarks/NOTES-archive.md).
template <typename T>
void forward(const KvHead<T>& kv, const Shape& shape, const int32_t* slots, int length, const Visible& visible,
             const float* q, int rows, int tile_n, Scratch& scratch, Result result) {
  const int d = shape.head_dim, dv = shape.v_head_dim;
  const int ldr = round_up(rows, kWidth), ldv = round_up(dv, kWidth);
  float* qt = Scratch::get(scratch.q, size_t(d) * ldr);
  float* k = Scratch::get(scratch.k, size_t(tile_n) * d);
  float* v = Scratch::get(scratch.v, size_t(tile_n) * ldv);
  float* scores = Scratch::get(scratch.scores, size_t(tile_n) * ldr);
  float* out = Scratch::get(scratch.out, size_t(rows) * ldv);
  float* max_score = Scratch::get(scratch.max, ldr);
  float* sum_exp = Scratch::get(scratch.sum, ldr);
  std::fill_n(qt, size_t(d) * ldr, 0.0f);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < d; ++i) qt[size_t(i) * ldr + r] = q[size_t(r) * d + i];
  std::fill_n(out, size_t(rows) * ldv, 0.0f);
  std::fill_n(v, size_t(tile_n) * ldv, 0.0f);
  std::fill_n(max_score, ldr, -INFINITY);
  std::fill_n(sum_exp, ldr, 0.0f);

  for (int begin = 0; begin < length; begin += tile_n) {
    const int n = std::min(tile_n, length - begin);
    for (int j = 0; j < n; ++j) {
      const int64_t slot = slots[begin + j];
      convert(kv.k + slot * kv.k_stride, k + size_t(j) * d, d);
      convert(kv.v + slot * kv.v_stride, v + size_t(j) * ldv, dv);
    }
    std::fill_n(scores, size_t(n) * ldr, 0.0f);
    gemm(k, d, 1, qt, ldr, scores, ldr, n, ldr, d);
    const bool whole = visible.whole(begin, begin + n);
    for (int r = 0; r < ldr; r += kWidth) {
      const Vec before = load(max_score + r);
      Vec now = before;
      for (int j = 0; j < n; ++j) {
        Vec s = load(scores + size_t(j) * ldr + r);
        if (shape.logit_cap > 0) s = cap(s, shape.logit_cap);
        if (!whole) s = hide(s, visible, r, begin + j);
        if (shape.logit_cap > 0 || !whole) store(scores + size_t(j) * ldr + r, s);
        now = max(now, s);
      }
      store(max_score + r, now);
      // A row that has seen nothing yet has no maximum to be compared with.
      if (!whole) now = now == splat(-INFINITY) ? Vec{} : now;
      const Vec rescale = exp_nonpositive(before - now);
      Vec total = load(sum_exp + r) * rescale;
      for (int j = 0; j < n; ++j) {
        const Vec p = exp_nonpositive(load(scores + size_t(j) * ldr + r) - now);
        store(scores + size_t(j) * ldr + r, p);
        total += p;
      }
      store(sum_exp + r, total);
      for (int i = r; i < std::min(r + kWidth, rows); ++i)
        if (rescale[i - r] != 1.0f)
          for (int c = 0; c < ldv; c += kWidth)
            store(out + size_t(i) * ldv + c, load(out + size_t(i) * ldv + c) * rescale[i - r]);
    }
    gemm(scores, 1, ldr, v, ldv, out, ldv, rows, ldv, n);
  }
  for (int r = 0; r < rows; ++r) {
    const bool seen = sum_exp[r] != 0;  // also where it is NaN
    const float norm = seen ? 1.0f / sum_exp[r] : 0.0f;
    for (int i = 0; i < dv; ++i) result.out[size_t(r) * dv + i] = out[size_t(r) * ldv + i] * norm;
    result.lse[r] = seen ? max_score[r] + std::log(sum_exp[r]) : -INFINITY;
  }
}

}  // namespace pat
