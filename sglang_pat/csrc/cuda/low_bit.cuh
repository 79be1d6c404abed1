// A page of KV in 4 or 2 bits, 64 tokens of one KV head, in the order in which a warp's lanes read it. csrc/cpu/low_bit.h says where everything
// is and how a number becomes a code; here codes become operands of the matrix products.
//
// A word of a lane has codes of two registers' halves: its lower byte's of one, its upper byte's of the other. `(w & mask) | 0x6400` makes of the
// codes n in a field of both of its 16-bit halves 1,024 + n 2^(bits * field) in __half, exactly. The 2^(bits * field) is undone in K's scales, which
// are kept divided by it, and in the results of V. The 1,024 is the same for all rows of an operand: a product of its own, from which sums start.
#pragma once

#include "ptx.cuh"
#include "threads.cuh"

namespace pat {

constexpr uint32_t kCodeBase = 0x64006400, kMinusCodeBase = 0xe400e400;  // 1,024 and -1,024, twice

template <int kBits, int kDim>
struct Record {
  static_assert((kBits == 4 || kBits == 2) && (kDim == 64 || kDim == 128));
  static constexpr int kCodes = kTokens * kDim * kBits / 8;
  static constexpr int kKeyZeros = 2 * kDim, kKeyCodes = 2 * kKeyZeros;  // K's scales come first
  static constexpr int kValueParameters = kKeyCodes + kCodes, kValueCodes = kValueParameters + 4 * kTokens;
  static constexpr int kBytes = kValueCodes + kCodes;

  static constexpr int kWordSteps = 4 / kBits;           // of a product, 16 channels each, that a word has codes of
  static constexpr int kWords = kDim / 16 / kWordSteps;  // of a lane, for 16 tokens
  static constexpr int kUnit = kWords < 4 ? kWords : 4;  // words that lie together
  static constexpr int kUnits = kWords / kUnit;

  // Strides in bytes. Among K's scales, and among its zeros, two steps of the products are a unit, in which a lane column has four pairs of channels: of
  // a step the lower eight's and the upper eight's, and of the next step. Among V's parameters, where a token's scale is in front of its zero, a lane's
  // row has eight tokens: of 16 the lower eight's and the upper eight's, and so on.
  static constexpr int kKeyUnit = 64, kKeyColumn = 16, kKeyStep = 8, kValueRow = 32;

  // In units of 16 bits, where a channel's scale is among K's scales, and its zero among their zeros; where a token's scale is among V's parameters.
  static __device__ __forceinline__ int key_parameter(int channel) {
    const int pair = channel / 16 * 2 + channel / 8 % 2;  // of its lane column
    return 2 * (kKeyUnit / 4 * (pair / 4) + kKeyColumn / 4 * (channel % 8 / 2) + pair % 4) + channel % 2;
  }
  static __device__ __forceinline__ int value_parameter(int token) {
    return 2 * (token % 8 * (kValueRow / 4) + token / 16 * 2 + token / 8 % 2);
  }

  // The lane that has a pair of neighbours, `pair` of four, in a row of eight of an operand.
  static constexpr __device__ int lane_of(int row, int pair) { return row * 4 + pair; }

  // Which of K's or V's words has a lane's codes of 16 tokens, of a step of 16 channels.
  static __device__ __forceinline__ int word_of(int chunk, int step, int lane) {
    const int word = step / kWordSteps;
    return ((chunk * kUnits + word / kUnit) * kWarpSize + lane) * kUnit + word % kUnit;
  }
  // And what the word `at` has: its first step.
  struct Word {
    int chunk, step, lane;
  };
  static __device__ __forceinline__ Word word_at(int at) {
    const int unit = at / (kUnit * kWarpSize);
    return {unit / kUnits, (unit % kUnits * kUnit + at % kUnit) * kWordSteps, at / kUnit % kWarpSize};
  }

  // A byte has fields of `kBits` bits: for each step that a word has codes of one of its lower eight channels, and one of its upper eight.
  static constexpr int kFields = 8 / kBits;
  static constexpr __device__ int field_of(int step, int upper) { return step % kWordSteps * 2 + upper; }
  static constexpr __device__ int field_of(int channel) { return field_of(channel / 16, channel / 8 % 2); }
  // Where a code is in its word. Of 16 tokens a half's lower byte has the lower eight, its upper one the others; halves are neighbours along an operand's
  // columns, which are K's channels and V's tokens.
  static constexpr __device__ int bit_of(int token, int neighbour, int field) {
    return neighbour % 2 * 16 + token / 8 % 2 * 8 + kBits * field;
  }

  // Words `kUnit * unit` on of 16 tokens; `codes` is where K's or V's begin.
  static __device__ __forceinline__ void load_words(uint32_t (&words)[kUnit], const uint8_t* codes, int chunk, int unit) {
    const uint8_t* const from = codes + ((chunk * kUnits + unit) * kWarpSize + lane_id()) * kUnit * 4;
    if constexpr (kUnit == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[0] = two.x, words[1] = two.y;
    }
  }

  // Left operands of a word's step `step`. K's rows are tokens, V's are channels.
  static __device__ __forceinline__ void key_operand(uint32_t (&a)[4], uint32_t word, int step) {
    const uint32_t up = word >> 8;
    a[0] = in_field(word, field_of(step, 0)), a[1] = in_field(up, field_of(step, 0));
    a[2] = in_field(word, field_of(step, 1)), a[3] = in_field(up, field_of(step, 1));
  }
  static __device__ __forceinline__ void value_operand(uint32_t (&a)[4], uint32_t word, int step) {
    const uint32_t up = word >> 8;
    a[0] = in_field(word, field_of(step, 0)), a[1] = in_field(word, field_of(step, 1));
    a[2] = in_field(up, field_of(step, 0)), a[3] = in_field(up, field_of(step, 1));
  }
  // By what results of V are too large: of the lower and the upper eight channels of a step.
  static constexpr int result_factor(int step, int upper) { return 1 << kBits * field_of(step, upper); }

  // A word's codes in a field of both of its halves' lower bytes, as above.
  static __device__ __forceinline__ uint32_t in_field(uint32_t word, int field) {
    constexpr uint32_t kCode = ((1u << kBits) - 1) * 0x00010001;
    return mask_or(word, kCode << kBits * field, kCodeBase);
  }
};

}  // namespace pat
