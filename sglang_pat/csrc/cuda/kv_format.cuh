// How K and V are kept in the pools, and what the matrix products take of them.
#pragma once

#include <type_traits>

#include "ptx.cuh"
#include "threads.cuh"

namespace pat {

// For Q and outputs of type T. KV of `kSame` is of T too, and multiplied as it is.
template <typename T, int kName>
struct KvFormat {
  using Product = T;  // that matrix products multiply
  static constexpr int kBytes = 2;
};

// A byte of either kind is a number of 16 bits exactly, and half as many instructions away from `__half` as from `__nv_bfloat16`.
// What it is to be multiplied by is the whole pool's: K's is part of the scale of scores, V's is multiplied in the end.
template <int kName>
struct KvFormat8 {
  using Product = __half;
  static constexpr int kBytes = 1;

  // Four bytes, as pairs of neighbours.
  static __device__ __forceinline__ void adjacent(uint32_t bytes, uint32_t& low, uint32_t& high) {
    if constexpr (kName == kE4m3) {
      e4m3_pairs(bytes, low, high);
    } else {
      low = __byte_perm(bytes, 0, 0x1404), high = __byte_perm(bytes, 0, 0x3424);
    }
  }
  // Four bytes, as pairs two apart.
  static __device__ __forceinline__ void interleaved(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    if constexpr (kName == kE4m3) {
      adjacent(__byte_perm(bytes, 0, 0x3120), even, odd);
    } else {
      even = __byte_perm(bytes, 0, 0x2404), odd = __byte_perm(bytes, 0, 0x3414);
    }
  }
};
template <typename T>
struct KvFormat<T, kE4m3> : KvFormat8<kE4m3> {};
template <typename T>
struct KvFormat<T, kE5m2> : KvFormat8<kE5m2> {};

// Full pages of few bits (low_bit.cuh); the tokens behind them are of T.
template <int kFew>
struct KvFormatPages {
  using Product = __half;
  static constexpr int kBits = kFew, kBytes = 0;
};
template <typename T>
struct KvFormat<T, kInt4> : KvFormatPages<4> {};
template <typename T>
struct KvFormat<T, kInt2> : KvFormatPages<2> {};

template <typename Kv>
constexpr bool kIsPages = Kv::kBytes == 0;

// A pair of Q, as the products take it: numbers beyond the range of `To` become its largest.
template <typename From, typename To>
__device__ __forceinline__ uint32_t convert_pair(uint32_t pair) {
  if constexpr (std::is_same_v<From, To>) {
    return pair;
  } else {
    static_assert(std::is_same_v<From, __nv_bfloat16> && std::is_same_v<To, __half>);
    return saturated_half_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

}  // namespace pat
