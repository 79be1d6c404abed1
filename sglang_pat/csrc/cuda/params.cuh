// What the kernels are called with, and the sizes that follow from dtype, head dimension and tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../packing/layout.h"

namespace pat {

constexpr int kThreads = 128;  // one warpgroup: what a 64-row wgmma needs
constexpr int kWarps = kThreads / 32;

// Strides are in elements.
struct Params {
  const void *q, *k, *v;        // [batch, heads, dim], [slots, kv_heads, dim] twice
  void* out;                    // [rows, heads, dim]
  float *partial, *lse;         // [workspace slots, heads, dim] and [workspace slots, heads], lse to base 2
  const int32_t* req_to_token;  // [requests, context]
  const int64_t *rows, *seq_lens;
  const int32_t* plan;
  int64_t q_row, q_head, k_slot, k_head, v_slot, v_head, table_row;
  int out_rows, heads, kv_heads, group, sms;
  float scale_log2;         // weights are 2 to the power of scores times this
  float cap, cap_exponent;  // before, scores become cap tanh(score / cap) = cap - 2 cap / (1 + 2^(score cap_exponent))
};

// K and V tiles lie in shared memory in panels of 64 columns: rows of 128 bytes whose 16-byte chunks are permuted by the
// row's lowest three bits. Both ldmatrix and wgmma read that without bank conflicts.
constexpr int kPanelColumns = 64, kPanelRow = 128;

__device__ __forceinline__ uint32_t panel_offset(int row, int chunk, int panel_bytes) {
  return (chunk >> 3) * panel_bytes + row * kPanelRow + (((chunk ^ row) & 7) << 4);
}

template <int kDim, int kTokens, int kMaxM>
struct Sizes {
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanel = kTokens * kPanelRow;  // bytes of a panel of a K or V tile
  static constexpr int kUnit = kPanels * kPanel;      // one K or one V tile
  static constexpr int kUnits = 4;                    // K and V of the tile in use and of the next
  static constexpr int kNarrowQ = 16 * kPanels * kPanelRow;
  static constexpr int kWideQ = kMaxM > 16 ? kMaxM * kPanels * kPanelRow : 0;
  static constexpr int kScratch = std::max(kWideQ, kWarps * 16 * kDim * 4);
};

}  // namespace pat
