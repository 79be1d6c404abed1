// In place of csrc/cuda/ptx.cuh: the same instructions, carried out by the machine. PTX ISA 8.x says what they do; the
// chapters on `mma`, `ldmatrix`, `movmatrix` and `mbarrier` say where operands are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "machine.h"
#include "products.h"

#undef __noinline__
#define __noinline__ __attribute__((noinline))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ thread_local  // each thread of the host has one CTA

inline const struct {
  struct {
    operator unsigned() const { return emulator::machine->current().index; }
  } x;
} threadIdx;
inline const struct {
  struct {
    operator unsigned() const { return emulator::machine->block(); }
  } x;
} blockIdx;
inline const struct {
  struct {
    operator unsigned() const { return emulator::machine->grid(); }
  } x;
} gridDim;

// CUDA's own functions.

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  struct In {
    T value;
    int lane;
  };
  return emulator::machine->together<T>(In{value, lane}, [](const In(&in)[32], T(&out)[32]) {
    for (int i = 0; i < 32; ++i) out[i] = in[in[i].lane & 31].value;
  });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(~0u, value, emulator::machine->current().lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return emulator::machine->together<unsigned>(value, [](const bool (&in)[32], unsigned (&out)[32]) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(in[i]) << i;
    std::fill_n(out, 32, bits);
  });
}
inline bool __any_sync(unsigned, bool value) { return __ballot_sync(~0u, value) != 0; }
inline int __reduce_add_sync(unsigned, int value) {
  return emulator::machine->together<int>(value, [](const int (&in)[32], int (&out)[32]) {
    int sum = 0;
    for (int x : in) sum += x;
    std::fill_n(out, 32, sum);
  });
}
inline int __reduce_max_sync(unsigned, int value) {
  return emulator::machine->together<int>(
      value, [](const int (&in)[32], int (&out)[32]) { std::fill_n(out, 32, *std::max_element(in, in + 32)); });
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  return emulator::machine->together<T>(
      value, [](const T(&in)[32], T(&out)[32]) { std::fill_n(out, 32, *std::min_element(in, in + 32)); });
}
inline void __syncwarp() {
  emulator::machine->together<char>('\0', [](const char (&)[32], char (&)[32]) {});
}
inline void __syncthreads() { emulator::machine->sync_all(); }
inline int __syncthreads_count(bool value) { return emulator::machine->sync_all(value); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
template <typename T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float __fdividef(float x, float y) { return x / y; }
#undef __log2f
inline float __log2f(float x) { return std::log2(x); }

namespace pat {

using emulator::machine;
using std::max;
using std::min;

inline uint32_t shared_address(const void* pointer) { return machine->address(pointer); }

inline void copy16(uint32_t to, const void* from) { machine->copy(to, from); }
inline void copy16_or_zero(uint32_t to, const void* from, bool valid) { machine->copy(to, valid ? from : nullptr); }
inline void copy4_or_zero(uint32_t to, const void* from, bool valid) { machine->copy(to, valid ? from : nullptr, 4); }
inline void copy8(uint32_t to, const void* from) { machine->copy(to, from, 8); }
inline uint64_t leaves_first() { return 0; }
inline void copy16(uint32_t to, const void* from, uint64_t) { machine->copy(to, from); }
inline void prefetch(const void*) {}
inline void commit_copies() { machine->commit_copies(); }
template <int kPending>
void wait_copies() {
  machine->wait_copies(kPending);
}

inline void fence_async_proxy() { machine->fence(); }
inline void launch_dependents() {}
inline void wait_for_primary() {}

template <typename T>
T fresh(T value) {
  return value;
}
inline int thread_of_cta() { return int(threadIdx.x); }
template <unsigned kCount>
int thread_of() {
  return int(threadIdx.x % kCount);
}
inline int lane_id() { return thread_of<32>(); }
inline int warp_id() { return int(threadIdx.x / 32); }

inline void sync_threads(int id, int threads) { machine->sync(id, threads); }
inline void arrive_threads(int id, int threads) { machine->arrive_named(id, threads); }
template <int kRegisters>
void shrink_registers() {
  machine->set_registers(kRegisters, false);
}
template <int kRegisters>
void grow_registers() {
  machine->set_registers(kRegisters, true);
}
inline void nap() {}

inline void init_barrier(uint32_t barrier, int arrivals) { machine->init_barrier(barrier, arrivals); }
inline void invalidate_barrier(uint32_t barrier) { machine->invalidate_barrier(barrier); }
inline void arrive(uint32_t barrier) { machine->arrive(barrier); }
inline void arrive(uint32_t barrier, int count) { machine->arrive(barrier, count); }
inline void arrive_after_copies(uint32_t barrier) { machine->arrive_after_copies(barrier); }
inline void wait_barrier(uint32_t barrier, int phase) { machine->wait_barrier(barrier, phase); }

using Registers = std::array<uint32_t, 4>;

// Lanes 8 i to 8 i + 7 say where the rows of matrix i are; a lane gets a pair of each.
template <bool kTransposed>
void load_matrices_as(uint32_t (&r)[4], uint32_t from) {
  machine->shared(from, 16);
  const Registers loaded = machine->together<Registers>(from, [](const uint32_t (&rows)[32], Registers(&out)[32]) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
          const int row = kTransposed ? lane % 4 * 2 + j : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + j;
          std::memcpy(&pair[j], machine->shared(rows[8 * i + row], 16) + 2 * column, 2);
        }
        std::memcpy(&out[lane][i], pair, 4);
      }
  });
  std::copy(loaded.begin(), loaded.end(), r);
}
inline void load_matrices(uint32_t (&r)[4], uint32_t from) { load_matrices_as<false>(r, from); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t from) { load_matrices_as<true>(r, from); }

inline void store_matrices(const uint32_t (&r)[4], uint32_t to) {
  struct Stored {
    uint32_t to, r[4];
  };
  const Stored own = {to, {r[0], r[1], r[2], r[3]}};
  machine->together<int>(own, [](const Stored(&in)[32], int (&)[32]) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) std::memcpy(machine->written(in[8 * i + lane / 4].to) + lane % 4 * 4, &in[lane].r[i], 4);
  });
}

inline void store_matrices_transposed(uint32_t first, uint32_t second, uint32_t to) {
  struct Stored {
    uint32_t to, r[2];
  };
  const Stored own = {to, {first, second}};
  machine->together<int>(own, [](const Stored(&in)[32], int (&)[32]) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
          const uint16_t bits = uint16_t(in[lane].r[i] >> 16 * j);
          std::memcpy(machine->written(in[8 * i + lane % 4 * 2 + j].to) + lane / 4 * 2, &bits, 2);
        }
  });
}

inline uint32_t transpose(uint32_t x) {
  return machine->together<uint32_t>(x, [](const uint32_t (&in)[32], uint32_t (&out)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      uint16_t pair[2];
      for (int j = 0; j < 2; ++j) pair[j] = uint16_t(in[(lane % 4 * 2 + j) * 4 + lane / 8] >> lane / 4 % 2 * 16);
      std::memcpy(&out[lane], pair, 4);
    }
  });
}

inline float exp2_fast(float x) { return std::exp2(x); }

inline void e4m3_pairs(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const auto pair = [](uint32_t bytes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(bytes), __NV_E4M3);
    return pair.x | uint32_t(pair.y) << 16;
  };
  low = pair(bytes), high = pair(bytes >> 16);
}

// What all 16 bits of type T mean.
template <typename T>
const float* numbers() {
  static const std::vector<float> all = [] {
    std::vector<float> numbers(1 << 16);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint16_t one = uint16_t(i);
      numbers[i] = float(reinterpret_cast<const T&>(one));
    }
    return numbers;
  }();
  return all.data();
}

inline uint16_t half_bits(float x) {
  const __half half(std::min(std::max(x, -65504.0f), 65504.0f));
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float half_float(uint16_t bits) {
  __half half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}
inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  __half x[2], y[2];
  std::memcpy(x, &a, 4), std::memcpy(y, &b, 4);
  const __half products[2] = {__half(float(x[0]) * float(y[0])), __half(float(x[1]) * float(y[1]))};
  uint32_t bits;
  std::memcpy(&bits, products, 4);
  return bits;
}
inline uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  __half x[2], y[2], z[2];
  std::memcpy(x, &a, 4), std::memcpy(y, &b, 4), std::memcpy(z, &c, 4);
  // A product of two __half is exact in float; doubles round sums once.
  const __half sums[2] = {__half(double(float(x[0])) * float(y[0]) + float(z[0])),
                          __half(double(float(x[1])) * float(y[1]) + float(z[1]))};
  uint32_t bits;
  std::memcpy(&bits, sums, 4);
  return bits;
}
inline uint32_t least_pair(uint32_t a, uint32_t b) {
  __half x[2], y[2];
  std::memcpy(x, &a, 4), std::memcpy(y, &b, 4);
  for (int i = 0; i < 2; ++i)
    if (std::isnan(float(y[i])) || float(y[i]) < float(x[i])) x[i] = y[i];
  uint32_t bits;
  std::memcpy(&bits, x, 4);
  return bits;
}
inline float2 to_floats(uint32_t pair) {
  __half x[2];
  std::memcpy(x, &pair, 4);
  return make_float2(float(x[0]), float(x[1]));
}
inline uint32_t mask_or(uint32_t x, uint32_t mask, uint32_t base) { return (x & mask) | base; }

inline uint32_t saturated_half_pair(float low, float high) {
  constexpr float kMost = 65504;
  const auto clamp = [&](float x) { return std::isnan(x) ? x : std::clamp(x, -kMost, kMost); };
  const __half pair[2] = {__half(clamp(low)), __half(clamp(high))};
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

template <typename T>
struct Half {
  static uint32_t pack(float low, float high) {
    const T pair[2] = {T(low), T(high)};
    uint32_t bits;
    std::memcpy(&bits, pair, 4);
    return bits;
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const emulator::MmaIn own{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    const emulator::Sums sums = machine->together<emulator::Sums>(
        own, [](const emulator::MmaIn(&in)[32], emulator::Sums(&out)[32]) { emulator::multiply(in, out, numbers<T>()); });
    std::copy(sums.begin(), sums.end(), d);
  }
};

}  // namespace pat
