// Kernel that unpacks pages of 4 or 2 bits into 16-bit K and V, [count, 64, kv_heads, dim], for attention kernels that know
// no records (backend/extends/low_bit_prefill.py). Values are those of csrc/cpu/low_bit.h, rounded. A CTA has a page of one KV head;
// a thread decodes eight channels of a token at a time, so whole rows are written.
#pragma once

#include "page_record.cuh"

namespace pat {

constexpr int kUnpackThreads = 64;  // differs from all other kernels': the emulator knows this one by it

struct UnpackParams {
  const uint8_t* records;  // [num_pages, kv_heads, record]
  const int64_t* pages;    // [count]
  void *k, *v;             // [count, kTokens, kv_heads, dim]
  int64_t num_pages;
  int kv_heads;
};

// A pair of T. For __half it saturates: an infinity would spoil all sums, while the page's other values are right.
template <typename T>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) return saturated_half_pair(low, high);
  return Half<T>::pack(low, high);
}

template <typename T, int kBits, int kDim>
struct RecordReader {
  using R = Record<kBits, kDim>;
  const uint32_t* words;  // of the record, in shared memory

  static __device__ float code(uint32_t word, int bit) { return float(word >> bit & ((1u << kBits) - 1)); }

  // Channels `channel` to `channel + 7` of a token, `channel` a multiple of 8.
  __device__ uint4 key(int token, int channel) const {
    const int field = R::field_of(channel), bit = R::bit_of(token, 0, field);
    const float divisor = float(1 << kBits * field);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = R::key_parameter(channel + 2 * i) / 2;
      const float2 scale = to_floats(words[at]), zero = to_floats(words[R::kKeyZeros / 4 + at]);
      const uint32_t codes = words[R::kKeyCodes / 4 + R::word_of(token / 16, channel / 16, R::lane_of(token % 8, i))];
      pairs[i] = rounded_pair<T>(zero.x + scale.x * divisor * code(codes, bit),
                                 zero.y + scale.y * divisor * code(codes, bit + 16));
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
  __device__ uint4 value(int token, int channel) const {
    const int bit = R::bit_of(token, token, R::field_of(channel));
    const float2 own = to_floats(words[R::kValueParameters / 4 + R::value_parameter(token) / 2]);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float two[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int lane = R::lane_of(2 * i + j, token % 8 / 2);
        const uint32_t codes = words[R::kValueCodes / 4 + R::word_of(token / 16, channel / 16, lane)];
        two[j] = own.y + own.x * code(codes, bit);
      }
      pairs[i] = rounded_pair<T>(two[0], two[1]);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

template <typename T, int kBits, int kDim>
__global__ void __launch_bounds__(kUnpackThreads) unpack_pages(const __grid_constant__ UnpackParams p) {
  using R = Record<kBits, kDim>;
  constexpr int kColumns = kDim / 8;  // of eight channels, 16 bytes
  static_assert(R::kBytes % 16 == 0 && kTokens * kColumns % kUnpackThreads == 0);
  __shared__ uint4 record[R::kBytes / 16];
  const int head = blockIdx.x % p.kv_heads, at = int(blockIdx.x / p.kv_heads), thread = thread_of_cta();
  const int64_t page = p.pages[at];
  const bool exists = page >= 0 && page < p.num_pages;
  if (exists) {
    const uint4* const from = reinterpret_cast<const uint4*>(p.records + (page * p.kv_heads + head) * R::kBytes);
    for (int i = thread; i < R::kBytes / 16; i += kUnpackThreads) record[i] = from[i];
  }
  __syncthreads();
  const RecordReader<T, kBits, kDim> reader{reinterpret_cast<const uint32_t*>(record)};
  uint4 *const k = static_cast<uint4*>(p.k), *const v = static_cast<uint4*>(p.v);
#pragma unroll 2
  for (int i = thread; i < kTokens * kColumns; i += kUnpackThreads) {
    const int token = i / kColumns, column = i % kColumns;
    const int64_t to = ((int64_t(at) * kTokens + token) * p.kv_heads + head) * kColumns + column;
    k[to] = exists ? reader.key(token, 8 * column) : uint4();
    v[to] = exists ? reader.value(token, 8 * column) : uint4();
  }
}

}  // namespace pat
