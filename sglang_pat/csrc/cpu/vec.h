// Vectors of floats as wide as the machine's, conversions of KV elements to float, and exp. forward.h, gemm.h and low_bit.h
// use it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pat {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * sizeof(float))));
typedef int32_t VecInt __attribute__((vector_size(kWidth * sizeof(float))));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline VecInt load_ints(const int32_t* p) {
  VecInt v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

inline Vec splat(float x) { return Vec{} + x; }

// NaN if either is NaN: a query that sees a broken token must not get an answer that looks sound.
inline Vec max(Vec a, Vec b) { return (a > b) | (a != a) ? a : b; }

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

// float8_e4m3fn and float8_e5m2, as torch names them (OCP 8-bit Floating Point Specification 1.0, table 1).
struct E4m3 {
  uint8_t bits;
};

struct E5m2 {
  uint8_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(Bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

// Without branches, so that loops vectorise. The multiplication rebiases the exponent from 15 to 127 and normalises
// subnormals.
inline float to_float(Fp16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t special = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  const float scaled = bits_to_float(magnitude) * bits_to_float((127u + 127u - 15u) << 23);
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof(bits));
  return bits_to_float(bits | special | uint32_t(x.bits & 0x8000) << 16);
}

// Without branches and without subnormal operands, which are slow and frequent in a cache: these get the exponent of the
// smallest normal number, 2^-6, which is subtracted again. The largest magnitude is NaN; there is no infinity.
inline float to_float(E4m3 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  const uint32_t subnormal = magnitude < 8 ? 1u : 0u;
  const uint32_t nan = magnitude == 0x7f ? 0x7fc00000u : 0u;
  const float value = bits_to_float((magnitude << 20) + ((127u - 7u + subnormal) << 23)) - float(subnormal) * 0.015625f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits_to_float(bits | nan | uint32_t(x.bits & 0x80) << 24);
}

// An e5m2 is the upper byte of an Fp16.
inline float to_float(E5m2 x) { return to_float(Fp16{uint16_t(x.bits << 8)}); }

inline uint16_t half_bits(float x) {
  const _Float16 half = static_cast<_Float16>(std::clamp(x, -65504.0f, 65504.0f));
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

inline float half_float(uint16_t bits) { return to_float(Fp16{bits}); }

template <typename T>
inline void convert(const T* __restrict from, float* __restrict to, int count) {
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// e^x for x <= 0 with a relative error under 2e-7; 0 below -87, NaN of NaN. The degree-6 Taylor polynomial in the reduced argument
// |r| <= ln(2)/2 has a remainder of 1.2e-7 (r^7/7!); the reduction is Cody and Waite's in two steps.
inline Vec exp_nonpositive(Vec x) {
  const Vec floor_limit = splat(-87.0f);
  const VecInt is_zero = x < floor_limit;
  x = max(x, floor_limit);
  const Vec scaled = x * 1.44269504f - 0.5f;
  const VecInt exponent =
      __builtin_convertvector(scaled, VecInt);  // truncation of a non-positive number: rounds to nearest
  const Vec k = __builtin_convertvector(exponent, Vec);
  const Vec r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  Vec p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Vec two_to_k = Vec((exponent + 127) << 23);  // its bits
  return is_zero ? Vec{} : p * two_to_k;
}

}  // namespace pat
