// In place of csrc/cuda/latent_wgmma_ptx.cuh: products with few columns, both operands in shared memory.
#pragma once

#include "wgmma_ptx.cuh"

namespace pat {

template <bool kTransposed, int kCount, typename T>
void wgmma_few(float (&d)[kCount], uint32_t a, uint32_t b, int accumulate, T) {
  start_wgmma<T, false>({d, {a, 0, 0, 0}, b, accumulate, 2 * kCount, kTransposed});
}

}  // namespace pat
