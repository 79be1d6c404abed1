// In place of csrc/cuda/wgmma_ptx.cuh: products that a warpgroup starts and waits for. Each warp has its own 16 rows, and a
// product is done when it is waited for, or at once by chance, from what is in shared memory then.
#pragma once

#include "ptx.cuh"

#if PAT_ARCH == 900
#define PAT_WGMMA 1
#endif

namespace pat {

inline uint32_t panel_descriptor(uint32_t address) { return (address & 0x3FFFF) >> 4; }
constexpr uint32_t descriptor_offset(int bytes) { return uint32_t(bytes >> 4); }

inline void wgmma_fence() {}

inline void wgmma_commit() {
  machine->together<char>('\0', [](const char (&)[32], char (&)[32]) {
    machine->products().emplace_back();
    if (machine->chance(4)) emulator::finish_groups(0);
  });
}

template <int kPending>
void wgmma_wait() {
  machine->together<char>('\0', [](const char (&)[32], char (&)[32]) { emulator::finish_groups(kPending); });
}

struct WgmmaIn {
  float* d;
  uint32_t a[4], b;
  int accumulate, columns = 64;
  bool transposed = false;
};

template <typename T, bool kRegisters>
void start_wgmma(const WgmmaIn& in) {
  machine->together<char>(in, [](const WgmmaIn(&in)[32], char (&)[32]) {
    auto& groups = machine->products();
    emulator::Product product = {};
    product.registers = kRegisters, product.accumulate = in[0].accumulate, product.first = true;
    product.columns = in[0].columns, product.transposed = in[0].transposed;
    product.right = in[0].b, product.numbers = numbers<T>();
    for (const auto& group : groups)
      for (const emulator::Product& other : group) product.first = product.first && other.sums[0] != in[0].d;
    for (int lane = 0; lane < 32; ++lane) {
      product.sums[lane] = in[lane].d;
      std::copy_n(in[lane].a, 4, product.left[lane]);
      if (in[lane].b != in[0].b || in[lane].accumulate != in[0].accumulate) machine->fail("operands differ between lanes");
      if (!kRegisters && in[lane].a[0] != in[0].a[0]) machine->fail("descriptors differ between lanes");
      if (!product.first) continue;
      std::copy_n(in[lane].d, product.columns / 2, product.before[lane]);
      std::fill_n(in[lane].d, product.columns / 2, NAN);
    }
    groups.back().push_back(product);
  });
}

template <typename T>
void wgmma_nt(float (&d)[32], uint32_t a, uint32_t b, int accumulate, T) {
  start_wgmma<T, false>({d, {a, 0, 0, 0}, b, accumulate});
}
template <typename T>
void wgmma_nn(float (&d)[32], const uint32_t (&a)[4], uint32_t b, T) {
  start_wgmma<T, true>({d, {a[0], a[1], a[2], a[3]}, b, 1});
}

}  // namespace pat
