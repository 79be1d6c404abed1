// Decode over full pages of 4-bit KV: what a narrow item of up to 8 rows would cost. 64 tokens a page, head dimension 128.
//
// A record is a page of one KV head, 8,960 bytes in the order in which the lanes read them; g = lane / 4, t = lane % 4:
//
//   K parameters 512    scales, then zeros, of channels: 16 pairs a t, pair e of channels 16 (e / 2) + 8 (e % 2) + 2 t and the next.
//                       16-byte unit i of t (pairs 4 i to 4 i + 3) is at 64 i + 16 t. Scales of odd pairs are divided by 16.
//   K codes 4,096       16 tokens at a time, 8 words a lane: word j is the A operand of S^T = K Q^T for channels 16 j to 16 j + 15
//   V parameters 256    (scale, zero) of tokens 16 c + 8 h + g, at 32 g + 8 c + 4 h
//   V codes 4,096       likewise, word j the A operand of O^T = V^T P^T for channels 16 j to 16 j + 15
//
// A word has eight codes n, two in each register of the operand: `(w & 0x000f000f) | 0x6400` is 1,024 + n in fp16, and
// `(w & 0x00f000f0) | 0x6400` is 1,024 + 16 n. So K's scales divide half of the channels by 16, the results of V's upper rows are
// divided at the end, and the 1,024 is a product of its own with the same right operand, from which the sums start.
#pragma once

#include "ptx.cuh"

namespace lowbit {

using pat::exp2_fast;
using Product = pat::Half<__half>;

constexpr int kPage = 64, kDim = 128, kGroup = 4, kChunks = kPage / 16, kSteps = kDim / 16;
constexpr int kKeyParameters = 512, kValueParameters = 256, kCodes = 4096;
constexpr int kKeys = kKeyParameters + kCodes, kValues = kValueParameters + kCodes, kRecord = kKeys + kValues;
constexpr int kHalf = kKeys;  // of a record: what a stage holds
constexpr uint32_t kLow = 0x000f000f, kHigh = 0x00f000f0, kBase = 0x64006400, kMinusBase = 0xe400e400;

struct Params {
  const __nv_bfloat16* q;  // [requests, kv_heads * kGroup, kDim]
  const uint8_t* records;  // [pages, kv_heads, kRecord]
  const int32_t* table;    // [requests, pages]
  __nv_bfloat16* out;      // as q
  __half* parts;           // [2 * warps, kGroup, kDim]
  float* lse2;             // [2 * warps, kGroup]
  int requests, kv_heads, pages, warps;
  float scale_log2;

  __device__ int items() const { return requests * kv_heads; }
  // Warp w has pages first(w) to first(w + 1) of all items' pages.
  __device__ int first(int warp) const { return int(int64_t(items()) * pages * warp / warps); }
  __device__ int warp_of(int page) const { return int((int64_t(page + 1) * warps - 1) / (int64_t(items()) * pages)); }
};

#ifndef LOWBIT_EMULATED
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// In one instruction: of C++, ptxas makes two, as neither constant is in a register.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t spread(uint32_t w) {
  uint32_t x;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(x) : "r"(w), "r"(kMask), "r"(kBase));
  return x;
}
#else
template <uint32_t kMask>
uint32_t spread(uint32_t w) {
  return (w & kMask) | kBase;
}
#endif

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  const __half2 c = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}

template <int kWarps, int kStages, bool kBulk>
struct Memory {
  alignas(1024) uint8_t stages[kWarps][kStages][kHalf];
  uint64_t full[kWarps][kStages];
};

template <int kWarps, int kStages, bool kBulk>
class Warp {
  using M = Memory<kWarps, kStages, kBulk>;

 public:
  __device__ Warp(const Params& p, M& memory)
      : p_(p), stages_(&memory.stages[pat::warp_id()][0][0]), full_(pat::shared_address(memory.full[pat::warp_id()])) {
    const int warp = blockIdx.x * kWarps + pat::warp_id();
    slot_ = 2 * warp;
    page_ = p.first(warp), end_ = p.first(warp + 1);
    reader_ = page_;
  }

  __device__ void run() {
    if (page_ == end_) return;
    if (kBulk) {
      if (pat::lane_id() == 0)
        for (int i = 0; i < kStages; ++i) pat::init_barrier(full_ + 8 * i, 1);
      __syncwarp();
    }
    reader_item_ = reader_ / p_.pages, reader_at_ = reader_ - reader_item_ * p_.pages;
    look_up();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) copy();
    int item = reader_first_item();
    bool fresh_item = true;
    const int first = item;
    int left = min((item + 1) * p_.pages, end_) - page_;
#pragma unroll 1
    while (true) {
      if (fresh_item) begin(item), fresh_item = false;
      keys(wait());
      release();
      values(wait());
      release();
      ++page_;
      if (--left > 0) continue;
      const int begun = item * p_.pages;
      finish(item, begun >= p_.first(slot_ / 2) && begun + p_.pages <= end_, slot_ + (item != first));
      if (page_ == end_) break;
      ++item;
      left = min(p_.pages, end_ - page_);
      fresh_item = true;
    }
    if (!kBulk) pat::wait_copies<0>();
  }

 private:
  __device__ int reader_first_item() const { return page_ / p_.pages; }

  // The record of the reader's page.
  __device__ void look_up() {
    const int request = reader_item_ / p_.kv_heads, head = reader_item_ - request * p_.kv_heads;
    if (reader_ < end_) slot_of_page_ = p_.table[request * p_.pages + reader_at_], head_ = head;
  }

  // Asks for the next half of a record: K, then V, by turns.
  __device__ void copy() {
    if (reader_ < end_) {
      const uint8_t* from =
          p_.records + (uint64_t(uint32_t(slot_of_page_)) * p_.kv_heads + head_) * kRecord + (copied_values_ ? kKeys : 0);
      const uint32_t to = pat::shared_address(stages_) + copied_ * kHalf;
      const int bytes = copied_values_ ? kValues : kKeys;
      if constexpr (kBulk) {
        if (pat::lane_id() == 0) bulk_copy(to, from, bytes, full_ + 8 * copied_);
      } else {
        const int offset = pat::lane_id() * 16;
#pragma unroll
        for (int i = 0; i < kHalf; i += 512)
          if (i + 512 <= kValues || i + offset < bytes) pat::copy16(to + i + offset, from + i + offset);
      }
      copied_ = copied_ == kStages - 1 ? 0 : copied_ + 1;
      if (copied_values_) {
        ++reader_;
        if (++reader_at_ == p_.pages) reader_at_ = 0, ++reader_item_;
        look_up();
      }
      copied_values_ = !copied_values_;
    }
    if constexpr (!kBulk) pat::commit_copies();
  }

  // The next half of a record, when it is there.
  __device__ const uint8_t* wait() {
    if constexpr (kBulk)
      pat::wait_barrier(full_ + 8 * used_, phase_);
    else
      pat::wait_copies<kStages - 1>();
    __syncwarp();
    return stages_ + used_ * kHalf;
  }
  __device__ void release() {
    __syncwarp();
    used_ = used_ == kStages - 1 ? 0 : used_ + 1;
    phase_ ^= used_ == 0;
    copy();
  }

  static __device__ uint4 load(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }

  __device__ void begin(int item) {
    const unsigned lane = pat::lane_id(), row = lane / 4, t = lane % 4;
    const uint32_t* q = reinterpret_cast<const uint32_t*>(p_.q + (int64_t(item) * kGroup + row) * kDim) + t;
#pragma unroll
    for (int e = 0; e < 2 * kSteps; ++e) {
      const uint32_t pair = row < kGroup ? q[e * 4] : 0;
      q_[e] = pat::saturated_half_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
    }
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) (&o_[0][0])[i] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) row_max_[i] = -INFINITY, sum_[i] = 0, zero_[i] = 0;
  }

  // Scores of a page: s_[c] of tokens 16 c + g and 16 c + 8 + g, rows 2 t and 2 t + 1.
  __device__ __forceinline__ void keys(const uint8_t* from) {
    const int lane = pat::lane_id();
    uint32_t scaled[2 * kSteps];
    float start[4] = {}, offset[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      const uint4 s = load(from + 64 * i + lane % 4 * 16), z = load(from + 256 + 64 * i + lane % 4 * 16);
      const uint32_t scales[4] = {s.x, s.y, s.z, s.w}, zeros[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) scaled[4 * i + e] = multiply(q_[4 * i + e], scales[e]);
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const uint32_t a[4] = {zeros[e], zeros[e], zeros[e + 1], zeros[e + 1]};
        const uint32_t b[4] = {kMinusBase, kMinusBase, kMinusBase, kMinusBase};
        Product::mma(start, a, q_[4 * i + e], q_[4 * i + e + 1]);
        Product::mma(offset, b, scaled[4 * i + e], scaled[4 * i + e + 1]);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[c][i] = start[i % 2] + offset[i % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[kChunks][4];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 w = load(from + kKeyParameters + (c * 2 + half) * 512 + lane * 16);
        words[c][0] = w.x, words[c][1] = w.y, words[c][2] = w.z, words[c][3] = w.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const uint32_t w = words[c][k], up = w >> 8;
          const uint32_t a[4] = {spread<kLow>(w), spread<kLow>(up), spread<kHigh>(w), spread<kHigh>(up)};
          const int e = 2 * (4 * half + k);
          Product::mma(s_[c], a, scaled[e], scaled[e + 1]);
        }
    }
  }

  __device__ __forceinline__ void values(const uint8_t* from) {
    const int lane = pat::lane_id();
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float higher = row_max_[i];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) higher = fmaxf(higher, fmaxf(s_[c][i], s_[c][i + 2]));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, mask));
      higher = (higher - row_max_[i]) * p_.scale_log2 > 8 ? higher : row_max_[i];  // softmax.cuh: kSlack
      const float base = higher * p_.scale_log2;
      correction[i] = exp2_fast(row_max_[i] * p_.scale_log2 - base);
      row_max_[i] = higher;
      sum_[i] *= correction[i], zero_[i] *= correction[i];
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int h = 0; h < 4; h += 2) s_[c][i + h] = exp2_fast(s_[c][i + h] * p_.scale_log2 - base);
    }
    const uint8_t* parameters = from + lane / 4 * 32;
    const uint4 low = load(parameters), high = load(parameters + 16);
    const uint32_t pairs[2 * kChunks] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t b[kChunks][2];
    float offset[4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 parameter = __half22float2(reinterpret_cast<const __half2&>(pairs[2 * c + h]));
        float weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float p = s_[c][2 * h + i];
          sum_[i] += p;
          zero_[i] += p * parameter.y;
          weights[i] = p * parameter.x;
        }
        b[c][h] = pat::transpose(Product::pack(weights[0], weights[1]));
      }
      const uint32_t a[4] = {kMinusBase, kMinusBase, kMinusBase, kMinusBase};
      Product::mma(offset, a, b[c][0], b[c][1]);
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[j][i] = o_[j][i] * correction[i % 2] + offset[i % 2];
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = load(from + kValueParameters + (c * 2 + half) * 512 + lane * 16);
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t w = words[k], up = w >> 8;
          const uint32_t a[4] = {spread<kLow>(w), spread<kHigh>(w), spread<kLow>(up), spread<kHigh>(up)};
          Product::mma(o_[4 * half + k], a, b[c][0], b[c][1]);
        }
      }
  }

  __device__ void finish(int item, bool whole, int part) {
    const int lane = pat::lane_id(), g = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i;
      float sum = sum_[i], zero = zero_[i];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        sum += __shfl_xor_sync(~0u, sum, mask), zero += __shfl_xor_sync(~0u, zero, mask);
      if (row >= kGroup) continue;
      const float norm = __fdividef(1, sum);
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = (o_[j][2 * h + i] * (h ? 0.0625f : 1) + zero) * norm;
          const int column = 16 * j + 8 * h + g;
          if (whole)
            p_.out[(int64_t(item) * kGroup + row) * kDim + column] = __float2bfloat16(x);
          else
            p_.parts[(int64_t(part) * kGroup + row) * kDim + column] = __float2half(x);
        }
      if (!whole && g == 0) p_.lse2[part * kGroup + row] = row_max_[i] * p_.scale_log2 + __log2f(sum);
    }
  }

  const Params& p_;
  uint8_t* const stages_;
  const uint32_t full_;
  int slot_, page_, end_;                         // where parts go; the page that is computed, and the end
  int reader_, reader_item_ = 0, reader_at_ = 0;  // the page that is asked for next
  int slot_of_page_ = 0, head_ = 0;
  int copied_ = 0, used_ = 0, phase_ = 0;
  bool copied_values_ = false;
  uint32_t q_[2 * kSteps];
  float s_[kChunks][4], o_[kSteps][4], row_max_[2], sum_[2], zero_[2];
};

template <int kWarps, int kStages, bool kBulk>
__global__ void __launch_bounds__(kWarps * 32, 1) forward(const __grid_constant__ Params p) {
#ifdef LOWBIT_EMULATED
  uint8_t* bytes = lowbit_shared;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  pat::launch_dependents();
  pat::wait_for_primary();
  Warp<kWarps, kStages, kBulk>(p, *reinterpret_cast<Memory<kWarps, kStages, kBulk>*>(bytes)).run();
}

// A CTA of four warps for each row of an item that several warps have parts of.
__global__ void __launch_bounds__(128) merge(const __grid_constant__ Params p) {
  __shared__ float sums[4][kDim], tops[4], totals[4];
  const int item = blockIdx.x / kGroup, row = blockIdx.x % kGroup, lane = pat::lane_id(), warp = pat::warp_id();
  pat::wait_for_primary();
  const int begin = p.warp_of(item * p.pages), last = p.warp_of((item + 1) * p.pages - 1);
  if (begin == last) return;
  const auto part_of = [&](int w) { return 2 * w + (p.first(w) / p.pages != item); };
  float top = -INFINITY, total = 0, sum[4] = {};
#pragma unroll 4
  for (int w = begin + warp; w <= last; w += 4) {
    if (p.first(w) == p.first(w + 1)) continue;
    const int64_t at = int64_t(part_of(w)) * kGroup + row;
    const float lse = p.lse2[at];
    const float2 pair = *reinterpret_cast<const float2*>(p.parts + at * kDim + lane * 4);
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(pair.x));
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(pair.y));
    const float higher = fmaxf(top, lse), old = exp2_fast(top - higher), share = exp2_fast(lse - higher);
    top = higher, total = total * old + share;
    sum[0] = sum[0] * old + low.x * share, sum[1] = sum[1] * old + low.y * share;
    sum[2] = sum[2] * old + high.x * share, sum[3] = sum[3] * old + high.y * share;
  }
  for (int i = 0; i < 4; ++i) sums[warp][lane * 4 + i] = sum[i];
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  __syncthreads();
  const float all = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  const int column = warp * 32 + lane;
  float x = 0, norm = 0;
  for (int i = 0; i < 4; ++i) {
    const float share = exp2_fast(tops[i] - all);
    x += sums[i][column] * share, norm += totals[i] * share;
  }
  p.out[(int64_t(item) * kGroup + row) * kDim + column] = __float2bfloat16(x / norm);
}

}  // namespace lowbit
