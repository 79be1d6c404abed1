// Pages of KV in 4 or 2 bits: 64 tokens of one KV head in a record, in the order in which the lanes of a GPU's warp read them. K has a scale
// and a zero for each channel of the page, V for each token (BitDecoding §4.1: KC and per-token V); a number is zero + scale * code. In 4 bits they
// are the range of the numbers, in 2 bits they are fitted to the numbers.
//
//   K parameters    dim scales, then dim zeros, fp16: of the channel pair e = 2 (c / 16) + c / 8 % 2 of lane column t = c % 8 / 2, in units
//                   of four pairs: unit e / 4 of column t is at 4 (e / 4) + t. Scales are divided by 2^(bits * field), see below.
//   K codes         A operands of m16n8k16 for S^T = K Q^T: rows are tokens, columns are channels
//   V parameters    (scale, zero) of 64 tokens, fp16: token 16 c + 8 h + g is at 8 g + 2 c + h
//   V codes         A operands for O^T = V^T P^T: rows are channels, columns are tokens
//
// A word has the codes of 4 / bits operands, of steps along the channels. Each of its 16-bit halves has one of a pair of neighbours along the
// columns; the byte in it says which half of the tokens; the field of the byte, `bits` wide, says which operand, and which half of
// the channels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "vec.h"

#include "../fit.h"

namespace pat {

constexpr int kPageTokens = 64;

// Where everything of a record is. Heads have a multiple of 32 dimensions, up to 256.
class LowBit {
 public:
  static constexpr int kMostDim = 256;

  const int bits, dim;

  LowBit(int bits, int dim) : bits(bits), dim(dim) {
    for (int c = 0; c < dim; ++c)
      for (bool is_v : {false, true}) channels_[is_v][c] = find(0, c, is_v);
    for (int t = 0; t < kPageTokens; ++t)
      for (bool is_v : {false, true}) tokens_[is_v][t] = find(t, 0, is_v);
  }

  static bool exists(int64_t bits, int64_t dim) {
    return (bits == 4 || bits == 2) && dim > 0 && dim <= kMostDim && dim % 32 == 0;
  }

  int parameter_bytes() const { return 4 * dim; }
  int code_bytes() const { return kPageTokens * dim * bits / 8; }
  int codes(bool is_v) const { return is_v ? v_parameters() + 4 * kPageTokens : parameter_bytes(); }
  int v_parameters() const { return parameter_bytes() + code_bytes(); }
  int bytes() const { return v_parameters() + 4 * kPageTokens + code_bytes(); }

  float k_divisor(int channel) const { return float(1 << channel_bit(channel, false) % 8); }
  // In units of fp16, where a channel's scale is among K's parameters, and a token's among V's.
  static int k_parameter(int channel) {
    const int e = channel / 16 * 2 + channel / 8 % 2, t = channel % 8 / 2;
    return 2 * (16 * (e / 4) + 4 * t + e % 4) + channel % 2;
  }
  static int v_parameter(int token) { return 2 * (token % 8 * 8 + token / 16 * 2 + token / 8 % 2); }

  // The first bit of a code, counted from the first of all K or V codes: a token's share, which is whole bytes, and
  // a channel's.
  int token_bit(int token, bool is_v) const { return tokens_[is_v][token]; }
  int channel_bit(int channel, bool is_v) const { return channels_[is_v][channel]; }

 private:
  int channels_[2][kMostDim], tokens_[2][kPageTokens];

  // In steps of 16 channels.
  int steps_of_word() const { return 4 / bits; }
  int words_of_lane() const { return dim / 16 / steps_of_word(); }
  int field_of(int channel) const { return channel / 16 % steps_of_word() * 2 + channel / 8 % 2; }

  int find(int token, int channel, bool is_v) const {
    const int along = is_v ? token : channel, across = is_v ? channel : token;  // columns and rows of the operand
    const int lane = across % 8 * 4 + along % 8 / 2, step = channel / 16, word = step / steps_of_word();
    const int in_word = along % 2 * 16 + token / 8 % 2 * 8 + field_of(channel) * bits;
    const int words = std::gcd(4, words_of_lane());  // that lie together: 16 bytes where they divide what there is
    const int at = ((token / 16 * (words_of_lane() / words) + word / words) * 32 + lane) * words + word % words;
    return at * 32 + in_word;
  }
};

// Of one channel's or token's numbers; codes are those nearest to the parameters as they are kept, the scale divided by `divisor`.
struct Quantised : Scaled {
  int levels;

  template <typename At>
  Quantised(int bits, int count, float divisor, const At& at) : levels((1 << bits) - 1) {
    float low = INFINITY, high = -INFINITY;
    bool nan = false;
    for (int i = 0; i < count; ++i) low = std::min(low, at(i)), high = std::max(high, at(i)), nan |= !std::isfinite(at(i));
    zero = half_bits(low + 0.0f);  // of -0 and 0 the order would decide
    least = half_float(zero);
    scale = nan ? 0x7e00 : half_bits(std::max(0.0f, high - least) / float(levels) / divisor);
    step = half_float(scale) * divisor;
    for (int round = 0; bits == 2 && round < kFits && step > 0; ++round) fit_to(count, divisor, at);
  }
  uint32_t code(float x) const {
    return step > 0 ? uint32_t(std::clamp(std::nearbyint((x - least) / step), 0.0f, float(levels))) : 0;
  }

 private:
  template <typename At>
  void fit_to(int count, float divisor, const At& at) {
    const float inverse = 1 / step;
    float codes = 0, squares = 0, distances[kFitSums] = {}, products[kFitSums] = {};
    for (int i = 0; i < count; ++i) {
      const float distance = at(i) - least;
      const float code = std::clamp(std::nearbyint(distance * inverse), 0.0f, float(levels));
      codes += code, squares += code * code, distances[i % kFitSums] += distance;
      products[i % kFitSums] = std::fma(code, distance, products[i % kFitSums]);
    }
    const auto sum = [](const float* of) { return (of[0] + of[1]) + (of[2] + of[3]); };
    fit(float(count), codes, squares, sum(distances), sum(products), divisor);
  }
};

// `k` and `v` are of the page's first token, tokens `stride` numbers apart.
inline void pack_page(const LowBit& form, const float* k, const float* v, int64_t stride, uint8_t* record) {
  std::memset(record, 0, form.bytes());
  uint16_t* const parameters = reinterpret_cast<uint16_t*>(record);
  const auto put = [&](int token, int channel, bool is_v, uint32_t code) {
    const int bit = form.token_bit(token, is_v) + form.channel_bit(channel, is_v);
    record[form.codes(is_v) + bit / 8] |= uint8_t(code << bit % 8);
  };
  for (int c = 0; c < form.dim; ++c) {
    const auto at = [&](int token) { return k[token * stride + c]; };
    const Quantised channel(form.bits, kPageTokens, form.k_divisor(c), at);
    parameters[LowBit::k_parameter(c)] = channel.scale;
    parameters[form.dim + LowBit::k_parameter(c)] = channel.zero;
    for (int token = 0; token < kPageTokens; ++token) put(token, c, false, channel.code(at(token)));
  }
  uint16_t* const v_parameters = parameters + form.v_parameters() / 2;
  for (int t = 0; t < kPageTokens; ++t) {
    const auto at = [&](int c) { return v[t * stride + c]; };
    const Quantised token(form.bits, form.dim, 1, at);
    v_parameters[LowBit::v_parameter(t)] = token.scale;
    v_parameters[LowBit::v_parameter(t) + 1] = token.zero;
    for (int c = 0; c < form.dim; ++c) put(t, c, true, token.code(at(c)));
  }
}

// Reads pages, one token at a time. K's scales and zeros are converted once for a page, as tokens of one come one after the other.
class PageReader {
 public:
  explicit PageReader(const LowBit& form) : form_(form) {}

  void k(const uint8_t* record, int token, float* __restrict to) {
    if (record != record_) convert_parameters(record);
    codes(record, token, false, to);
    for (int c = 0; c < form_.dim; ++c) to[c] = zeros_[c] + scales_[c] * to[c];
  }
  void v(const uint8_t* record, int token, float* __restrict to) const {
    const Fp16* const own = reinterpret_cast<const Fp16*>(record + form_.v_parameters()) + LowBit::v_parameter(token);
    const float scale = to_float(own[0]), zero = to_float(own[1]);
    codes(record, token, true, to);
    for (int c = 0; c < form_.dim; ++c) to[c] = zero + scale * to[c];
  }

 private:
  const LowBit& form_;
  const uint8_t* record_ = nullptr;  // whose K's parameters these are
  float scales_[LowBit::kMostDim], zeros_[LowBit::kMostDim];

  void convert_parameters(const uint8_t* record) {
    const Fp16* const scales = reinterpret_cast<const Fp16*>(record);
    for (int c = 0; c < form_.dim; ++c) {
      const int at = LowBit::k_parameter(c);
      scales_[c] = to_float(scales[at]) * form_.k_divisor(c), zeros_[c] = to_float(scales[form_.dim + at]);
    }
    record_ = record;
  }
  void codes(const uint8_t* record, int token, bool is_v, float* __restrict to) const {
    const uint8_t* const first = record + form_.codes(is_v) + form_.token_bit(token, is_v) / 8;
    const uint32_t mask = (1u << form_.bits) - 1;
    for (int c = 0; c < form_.dim; ++c) {
      const uint32_t bit = uint32_t(form_.channel_bit(c, is_v));
      to[c] = float(int(first[bit / 8] >> bit % 8 & mask));
    }
  }
};

// Pages of one KV head, as a source of `OnlineSoftmax`: slot s is token s % 64 of page s / 64, pages `stride` bytes apart.
struct PagesOfHead {
  PageReader& reader;
  const uint8_t* records;
  int64_t stride;

  static constexpr bool latent() { return false; }  // as of KvHead

  void read(int64_t slot, float* k, float* v) const {
    const uint8_t* const record = records + slot / kPageTokens * stride;
    reader.k(record, int(slot % kPageTokens), k);
    reader.v(record, int(slot % kPageTokens), v);
  }
};

}  // namespace pat
