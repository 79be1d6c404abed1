// Layout of shared memory. Q, K and V lie in panels: rows of 128 bytes (64 columns of 16 bits) in the 128-byte swizzle,
// which ldmatrix and wgmma read without bank conflicts. Also the named barriers of a CTA, and how much shared memory each
// architecture has.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace pat {

// The 16-byte chunks of a panel's row are permuted by the row's lowest three bits. `panel_offset` is where chunk `chunk` of
// row `row` lies.
constexpr int kPanelColumns = 64, kPanelRow = 128;
constexpr int kPanelAlign = 8 * kPanelRow;        // the swizzle repeats after eight rows
constexpr int kPanelBytes = kTokens * kPanelRow;  // of a KV tile

__device__ __forceinline__ uint32_t panel_offset(int row, int chunk, int panel_bytes) {
  return (chunk >> 3) * panel_bytes + row * kPanelRow + (((chunk ^ row) & 7) << 4);
}

// The offset `step` k16 steps of a matrix product further: 2 `step` chunks.
__device__ __forceinline__ uint32_t next_step(uint32_t offset, int step, int panel_bytes) {
  return (offset ^ (step % 4 << 5)) + step / 4 * panel_bytes;
}

// The same chunk `row` rows further. The offset's own row must be a multiple of eight, or of a power of two above `row`.
__device__ __forceinline__ uint32_t next_row(uint32_t offset, int row) {
  return (offset ^ (row % 8 << 4)) + row * kPanelRow;
}

constexpr int panels(int dim) { return (dim + kPanelColumns - 1) / kPanelColumns; }
constexpr int row_panels(int row_bytes) { return (row_bytes + kPanelRow - 1) / kPanelRow; }

// Named barriers; 0 is __syncthreads. Warpgroups and teams use the same ones: a pass with wide items has no teams.
constexpr int kWideBarrier = 1, kRegistersBarrier = 2, kProducerBarrier = 3;
constexpr int kTeamBarrier = 4, kMostTeams = 6;  // one for each team, for each of two kinds of items
constexpr int kWarpgroupBarrier = kTeamBarrier;  // one for each warpgroup
// One for each warpgroup that computes latents: its weights are there for the other one.
constexpr int kLatentWarpgroups = 2, kPublishedBarrier = kWarpgroupBarrier + kLatentWarpgroups;
// Producers wait here at the end of a pass until the consumers have grown their registers. If a producer grew its own
// first, consumers could wait for registers for ever, and producers for them. A pass with wide items uses one barrier and a
// pass without the other; neither uses it otherwise.
constexpr int kGrownInWide = kTeamBarrier + kMostTeams, kGrownInNarrow = kWideBarrier;
static_assert(kTeamBarrier + 2 * kMostTeams <= 16, "a CTA has 16 named barriers");
static_assert(kPublishedBarrier + kLatentWarpgroups <= kGrownInWide);

// Shared memory of a CTA (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr int kSharedLimit = (Variant::kArch == 900 || Variant::kArch == 1000 ? 227
                              : Variant::kArch == 800                         ? 163
                                                                              : 99)
                             << 10;

// Stages of KV in shared memory for each warp with narrow items.
constexpr int kNarrowStages = 2;

// cp.async copies 16 bytes: the threads that copy a row, each one chunk of it. A power of two, so with some dimensions a
// few are idle.
constexpr int kCopyBytes = 16;
constexpr int row_threads(int row_bytes) {
  int threads = 4;
  while (threads * kCopyBytes < row_bytes) threads *= 2;
  return threads;
}

}  // namespace pat
