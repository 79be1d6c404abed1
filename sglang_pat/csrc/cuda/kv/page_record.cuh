// A record: one page of KV in 4 or 2 bits, 64 tokens of one KV head, in the order in which a warp's lanes read it as
// mma.sync operands. csrc/cpu/low_bit.h has the layout and the quantisation; here codes become operands. page_rows.cuh,
// page_convert.cuh, page_store.cuh and page_unpack.cuh use it.
//
// A 32-bit word of a lane has the codes of two operand registers, one in the lower byte of each half, the other in the
// upper byte. `(w & mask) | 0x6400` turns the codes n in one field of both halves into 1,024 + n 2^(bits * field) in
// __half, exactly. K's scales are stored divided by 2^(bits * field); for V, results are divided. The 1,024 is subtracted
// by a product of its own, from which the sums start: it is the same for all rows of an operand.
#pragma once

#include "../ptx.cuh"
#include "../threads.cuh"

namespace pat {

constexpr uint32_t kCodeBase = 0x64006400, kMinusCodeBase = 0xe400e400;  // 1,024 and -1,024, twice

template <int kBits, int kDim>
struct Record {
  static_assert((kBits == 4 || kBits == 2) && (kDim == 64 || kDim == 128));
  static constexpr int kCodes = kTokens * kDim * kBits / 8;
  static constexpr int kKeyZeros = 2 * kDim, kKeyCodes = 2 * kKeyZeros;  // K's scales come first
  static constexpr int kValueParameters = kKeyCodes + kCodes, kValueCodes = kValueParameters + 4 * kTokens;
  static constexpr int kBytes = kValueCodes + kCodes;

  static constexpr int kWordSteps = 4 / kBits;           // k16 steps, 16 channels each, whose codes a word has
  static constexpr int kWords = kDim / 16 / kWordSteps;  // words of a lane for 16 tokens
  static constexpr int kUnit = kWords < 4 ? kWords : 4;  // words that lie together, a unit
  static constexpr int kUnits = kWords / kUnit;

  // Strides in bytes. K's scales, and its zeros: a unit is two k16 steps, in which each lane column has four pairs of
  // channels (lower and upper eight of both steps). V's parameters: a token's scale is followed by its zero, and a lane row
  // has eight tokens (lower and upper eight of each 16).
  static constexpr int kKeyUnit = 64, kKeyColumn = 16, kKeyStep = 8, kValueRow = 32;

  // Index, in units of 16 bits, of a channel's scale among K's scales (its zero is at the same index among the zeros), and
  // of a token's scale among V's parameters.
  static __device__ __forceinline__ int key_parameter(int channel) {
    const int pair = channel / 16 * 2 + channel / 8 % 2;  // of its lane column
    return 2 * (kKeyUnit / 4 * (pair / 4) + kKeyColumn / 4 * (channel % 8 / 2) + pair % 4) + channel % 2;
  }
  static __device__ __forceinline__ int value_parameter(int token) {
    return 2 * (token % 8 * (kValueRow / 4) + token / 16 * 2 + token / 8 % 2);
  }

  // The lane with pair `pair`, of four, of row `row` of an operand.
  static constexpr __device__ int lane_of(int row, int pair) { return row * 4 + pair; }

  // Index of the word with a lane's codes for 16 tokens (`chunk`) and 16 channels (`step`).
  static __device__ __forceinline__ int word_of(int chunk, int step, int lane) {
    const int word = step / kWordSteps;
    return ((chunk * kUnits + word / kUnit) * kWarpSize + lane) * kUnit + word % kUnit;
  }
  // The inverse: what word `at` has, from its first step on.
  struct Word {
    int chunk, step, lane;
  };
  static __device__ __forceinline__ Word word_at(int at) {
    const int unit = at / (kUnit * kWarpSize);
    return {unit / kUnits, (unit % kUnits * kUnit + at % kUnit) * kWordSteps, at / kUnit % kWarpSize};
  }

  // A byte has fields of `kBits` bits: for each step of the word a channel of the lower eight and one of the upper eight.
  static constexpr int kFields = 8 / kBits;
  static constexpr __device__ int field_of(int step, int upper) { return step % kWordSteps * 2 + upper; }
  static constexpr __device__ int field_of(int channel) { return field_of(channel / 16, channel / 8 % 2); }
  // First bit of a code in its word. Of 16 tokens the lower eight are in a half's lower byte. The halves are neighbours
  // along an operand's columns: channels of K, tokens of V.
  static constexpr __device__ int bit_of(int token, int neighbour, int field) {
    return neighbour % 2 * 16 + token / 8 % 2 * 8 + kBits * field;
  }

  // Loads unit `unit` of 16 tokens; `codes` is where K's or V's codes begin.
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

  // Left operands of step `step` of a word. K: rows are tokens. V: rows are channels.
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
  // The factor by which V's results are too large, for the lower or upper eight channels of a step.
  static constexpr int result_factor(int step, int upper) { return 1 << kBits * field_of(step, upper); }

  // The operand register from one field of a word, as above.
  static __device__ __forceinline__ uint32_t in_field(uint32_t word, int field) {
    constexpr uint32_t kCode = ((1u << kBits) - 1) * 0x00010001;
    return mask_or(word, kCode << kBits * field, kCodeBase);
  }
};

}  // namespace pat
