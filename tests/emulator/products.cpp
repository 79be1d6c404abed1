// What products compute, eight numbers at a time in a vector register of the host.
#include "products.h"

namespace emulator {

namespace {

using Eight = float __attribute__((vector_size(32)));

// The numbers of a left operand of 16 x 16, which lanes hold in pairs.
void left_operand(float (&to)[16][16], const uint32_t (&registers)[4], int lane, const float* numbers) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j)
      to[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + j] = numbers[uint16_t(registers[i] >> 16 * j)];
}

// Eight numbers of a panel: rows of 128 bytes, whose 16-byte chunks are permuted by three bits of their address.
Eight panel_numbers(const float* numbers, uint32_t descriptor, int row, int column) {
  uint32_t address = (descriptor << 4) + row * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits[8];
  std::memcpy(bits, machine->shown(address), sizeof(bits));
  Eight eight;
  for (int i = 0; i < 8; ++i) eight[i] = numbers[bits[i]];
  return eight;
}

void finish(const Product& product, int warp_of_group) {
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

}  // namespace

void multiply(const MmaIn (&in)[kWarpSize], Sums (&out)[kWarpSize], const float* numbers) {
  float a[16][16];
  Eight b[16], sums[16];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    left_operand(a, in[lane].a, lane, numbers);
    for (int i = 0; i < 4; ++i) {
      b[lane % 4 * 2 + i / 2 * 8 + i % 2][lane / 4] = numbers[uint16_t(in[lane].b[i / 2] >> i % 2 * 16)];
      sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = in[lane].d[i];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) sums[row] += a[row][k] * b[k];
  for (int lane = 0; lane < kWarpSize; ++lane)
    for (int i = 0; i < 4; ++i) out[lane][i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

void finish_groups(int pending) {
  auto& groups = machine->products();
  for (; int(groups.size()) > pending + 1; groups.pop_front())
    for (const Product& product : groups.front()) finish(product, machine->current().warp() % 4);
}

}  // namespace emulator
