// Formats of K and V in the pools, and the 16-bit type that matrix products multiply. `KvFormat<T, name>` of a module's Q
// type T and Variant::kKv tells every kernel how to load an operand.
#pragma once

#include <type_traits>

#include "../ptx.cuh"
#include "../threads.cuh"

namespace pat {

enum class KvLayout { kPlain, kPages };  // as in packing/spec.py
template <typename T, int kName>
struct KvFormat;  // of every KvName

// 16-bit KV has the type of Q and needs no conversion.
template <typename T>
struct KvFormat<T, kSame> {
  using Product = T;  // operand type of the matrix products
  static constexpr KvLayout kLayout = KvLayout::kPlain;
  static constexpr int kBytes = 2;
};

// 8-bit KV. Each value is exact in __half, and the conversion takes half the instructions of one to __nv_bfloat16. The
// scale is one per pool: K's is part of the softmax scale, V's is applied at the end.
template <int kName>
struct KvFormat8 {
  using Product = __half;
  static constexpr KvLayout kLayout = KvLayout::kPlain;
  static constexpr int kBytes = 1;

  // Bytes 0 1 2 3 as the pairs (0, 1) and (2, 3).
  static __device__ __forceinline__ void adjacent(uint32_t bytes, uint32_t& low, uint32_t& high) {
    if constexpr (kName == kFloat8_e4m3fn) {
      e4m3_pairs(bytes, low, high);
    } else {
      low = __byte_perm(bytes, 0, 0x1404), high = __byte_perm(bytes, 0, 0x3424);
    }
  }
  // Eight bytes likewise, as four pairs.
  static __device__ __forceinline__ uint4 adjacent(uint32_t first, uint32_t second) {
    uint4 pairs;
    adjacent(first, pairs.x, pairs.y), adjacent(second, pairs.z, pairs.w);
    return pairs;
  }
  // Bytes 0 1 2 3 as the pairs (0, 2) and (1, 3).
  static __device__ __forceinline__ void interleaved(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    if constexpr (kName == kFloat8_e4m3fn) {
      adjacent(__byte_perm(bytes, 0, 0x3120), even, odd);
    } else {
      even = __byte_perm(bytes, 0, 0x2404), odd = __byte_perm(bytes, 0, 0x3414);
    }
  }
};
template <typename T>
struct KvFormat<T, kFloat8_e4m3fn> : KvFormat8<kFloat8_e4m3fn> {};
template <typename T>
struct KvFormat<T, kFloat8_e5m2> : KvFormat8<kFloat8_e5m2> {};

// Full pages of 4 or 2 bits (page_record.cuh); tokens behind the last full page are of type T.
template <int kFew>
struct KvFormatPages {
  using Product = __half;
  static constexpr KvLayout kLayout = KvLayout::kPages;
  static constexpr int kBits = kFew, kBytes = 0;
};
template <typename T>
struct KvFormat<T, kInt4> : KvFormatPages<4> {};
template <typename T>
struct KvFormat<T, kInt2> : KvFormatPages<2> {};

template <typename Kv>
constexpr bool kIsPages = Kv::kLayout == KvLayout::kPages;

// A pair of Q as operand of the products. Values beyond the range of `To` saturate.
template <typename From, typename To>
__device__ __forceinline__ uint32_t convert_pair(uint32_t pair) {
  if constexpr (std::is_same_v<From, To>) {
    return pair;
  } else {
    static_assert(std::is_same_v<From, __nv_bfloat16> && std::is_same_v<To, __half>);
    return saturated_half_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}
template <typename From, typename To>
__device__ __forceinline__ uint4 convert_pairs(uint4 x) {
  return make_uint4(convert_pair<From, To>(x.x), convert_pair<From, To>(x.y), convert_pair<From, To>(x.z),
                    convert_pair<From, To>(x.w));
}

}  // namespace pat
