// The scale and the zero of quantised numbers, and how 2 bits' are fitted to them: the same bytes on CPUs (cpu/low_bit.h) and on GPUs
// (cuda/kv/page_store.cuh), which define `half_bits` and `half_float`, and sum in the same order.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define PAT_FIT __device__ __forceinline__
#else
#define PAT_FIT inline
#endif

namespace pat {

// How often 2 bits' scale and zero are fitted to the codes by least squares, and the codes chosen anew; the range of the numbers is a bad
// scale for four codes. More rounds gain nothing (benchmarks/notes/low-bit-kv.md, "Why 2 bits cost so much"), nor does 4 bits gain what it would cost.
constexpr int kFits = 2;
constexpr int kFitSums = 4;  // of every fourth number each

struct Scaled {
  float step, least;     // a number is least + step * code
  uint16_t scale, zero;  // as they are kept, the scale divided by a divisor

  // Fits them to `n` numbers with these sums: of codes and their squares, which are exact in any order; of distances from `least`, which cancel
  // less than the numbers would; and of codes times distances.
  PAT_FIT void fit(float n, float codes, float squares, float distances, float products, float divisor) {
    const float slope = fmaf(n, products, -(codes * distances)) / (n * squares - codes * codes);
    const float zero_moved = fmaf(-slope, codes, distances) / n;
    const uint16_t new_zero = half_bits(least + zero_moved + 0.0f);
    const float moved = half_float(new_zero) - least;
    // The best for the zero as it is kept.
    const uint16_t new_scale = half_bits(fmaf(-moved, codes, products) / squares / divisor);
    const float new_step = half_float(new_scale) * divisor;
    // Not where all codes are equal, nor where numbers are too large to be added.
    if (!(step > 0 && fabsf(zero_moved) < INFINITY && new_step > 0)) return;
    zero = new_zero, scale = new_scale, least = half_float(zero), step = new_step;
  }
};

}  // namespace pat
