// Merges the parts of one query and head by their log-sum-exp (PAT section 7), in float32. attention.cpp calls it after the
// forward of all items.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pat {

// partial[p * stride + i] and lse[p * lse_stride] are part p; `sink` is a logit without a value, or -inf. Writes out[dim],
// zeros if no part saw KV.
inline void merge(const float* partial, int64_t stride, const float* lse, int64_t lse_stride, int parts, int dim,
                  float sink, float* out) {
  float top = -INFINITY;
  for (int p = 0; p < parts; ++p) {
    const float one = lse[p * lse_stride];
    if (one > top || std::isnan(one)) top = one;
  }
  std::fill_n(out, dim, 0.0f);
  if (top == -INFINITY) return;
  float total = std::exp(sink - top);
  for (int p = 0; p < parts; ++p) total += std::exp(lse[p * lse_stride] - top);
  for (int p = 0; p < parts; ++p) {
    const float weight = std::exp(lse[p * lse_stride] - top) / total;
    if (weight == 0.0f) continue;
    for (int i = 0; i < dim; ++i) out[i] += weight * partial[p * stride + i];
  }
}

}  // namespace pat
