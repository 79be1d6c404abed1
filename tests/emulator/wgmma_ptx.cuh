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

// Eight numbers of a panel: rows of 128 bytes, whose 16-byte chunks are permuted by three bits of their address.
inline Eight panel_numbers(const float* numbers, uint32_t descriptor, int row, int column) {
  uint32_t address = (descriptor << 4) + row * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits[8];
  std::memcpy(bits, machine->shown(address), sizeof(bits));
  Eight eight;
  for (int i = 0; i < 8; ++i) eight[i] = numbers[bits[i]];
  return eight;
}

inline void finish(const emulator::Product& product, int warp_of_group) {
  float a[16][16];
  Eight b[16][8], d[16][8] = {};
  for (int lane = 0; lane < 32; ++lane)
    if (product.registers) left_operand(a, product.left[lane], lane, product.numbers);
  for (int k = 0; k < 16; k += 8) {
    for (int row = 0; row < 16 && !product.registers && !product.transposed; ++row) {
      const Eight eight = panel_numbers(product.numbers, product.left[0][0], warp_of_group * 16 + row, k);
      for (int i = 0; i < 8; ++i) a[row][k + i] = eight[i];
    }
    for (int column = 0; column < product.columns && !product.registers; ++column) {
      const Eight eight = panel_numbers(product.numbers, product.right, column, k);
      for (int i = 0; i < 8; ++i) b[k + i][column / 8][column % 8] = eight[i];
    }
  }
  for (int k = 0; k < 16 && product.transposed; ++k)
    for (int row = 0; row < 16; row += 8) {
      const Eight eight = panel_numbers(product.numbers, product.left[0][0], k, warp_of_group * 16 + row);
      for (int i = 0; i < 8; ++i) a[row + i][k] = eight[i];
    }
  for (int k = 0; k < 16 && product.registers; ++k)
    for (int i = 0; i < 8; ++i) b[k][i] = panel_numbers(product.numbers, product.right, k, 8 * i);
  const auto each_sum = [&](auto function) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < product.columns / 2; ++i)
        function(d[lane / 4 + i / 2 % 2 * 8][i / 4], lane % 4 * 2 + i % 2, product.sums[lane][i], product.before[lane][i]);
  };
  if (product.accumulate)
    each_sum([&](Eight& sums, int i, float own, float before) { sums[i] = product.first ? before : own; });
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < product.columns / 8; ++i) d[row][i] += a[row][k] * b[k][i];
  each_sum([&](const Eight& sums, int i, float& own, float) { own = sums[i]; });
}

// This warp's groups of products, but for the last `pending` that are committed and the one that is not.
inline void finish_groups(int pending) {
  auto& groups = machine->products();
  for (; int(groups.size()) > pending + 1; groups.pop_front())
    for (const emulator::Product& product : groups.front()) finish(product, machine->current().warp() % 4);
}

inline void wgmma_commit() {
  machine->together<char>('\0', [](const char (&)[32], char (&)[32]) {
    machine->products().emplace_back();
    if (machine->chance(4)) finish_groups(0);
  });
}

template <int kPending>
void wgmma_wait() {
  machine->together<char>('\0', [](const char (&)[32], char (&)[32]) { finish_groups(kPending); });
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
