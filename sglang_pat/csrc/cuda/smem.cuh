// How shared memory is laid out and filled, and which barriers order its use.
#pragma once

#include <cstdint>

namespace pat {

// K and V lie in shared memory in panels of 64 columns of 16 bits: rows of 128 bytes whose 16-byte chunks are permuted by the row's
// lowest three bits. Both ldmatrix and wgmma read that without bank conflicts.
constexpr int kPanelColumns = 64, kPanelRow = 128;
constexpr int kPanelAlign = 8 * kPanelRow;  // after so many bytes the permutation begins again

__device__ __forceinline__ uint32_t panel_offset(int row, int chunk, int panel_bytes) {
  return (chunk >> 3) * panel_bytes + row * kPanelRow + (((chunk ^ row) & 7) << 4);
}

// Where the chunk 2 `step` columns further is, `step` steps of a matrix product of 16 columns on.
__device__ __forceinline__ uint32_t next_step(uint32_t offset, int step, int panel_bytes) {
  return (offset ^ (step % 4 << 5)) + step / 4 * panel_bytes;
}

// Where the same chunk is `row` rows further on. The offset's own row must be a multiple of eight, or of the power of two
// that `row` stays below.
__device__ __forceinline__ uint32_t next_row(uint32_t offset, int row) {
  return (offset ^ (row % 8 << 4)) + row * kPanelRow;
}

constexpr int panels(int dim) { return (dim + kPanelColumns - 1) / kPanelColumns; }
constexpr int row_panels(int row_bytes) { return (row_bytes + kPanelRow - 1) / kPanelRow; }

// Named barriers; 0 is __syncthreads.
constexpr int kWideBarrier = 1, kRegistersBarrier = 2, kProducerBarrier = 3;
constexpr int kTeamBarrier = 4, kMostTeams = 6;  // of the first team, for each of two phases
constexpr int kWarpgroupBarrier =
    kTeamBarrier;  // of the first group of warps: while there are wide items, there are no teams
// Where the warps that load wait at the end of a pass, before they take their registers back, until those that compute have taken theirs: else these could
// wait for registers for ever, and the warps that load for them. Barriers that a pass with wide items, or one without, does not use otherwise.
constexpr int kGrownInWide = kTeamBarrier + kMostTeams, kGrownInNarrow = kWideBarrier;
static_assert(kTeamBarrier + 2 * kMostTeams <= 16, "a CTA has 16 named barriers");

// The most shared memory that a CTA may have (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr int kSharedLimit = (Variant::kArch == 900 || Variant::kArch == 1000 ? 227
                              : Variant::kArch == 800                         ? 163
                                                                              : 99)
                             << 10;

// Chunks of a narrow item in shared memory for each warp.
constexpr int kNarrowStages = 2;

// 16-byte copies: a thread copies one chunk of each of several rows. Chunks that are no power of two leave some idle.
constexpr int kCopyBytes = 16;
constexpr int row_threads(int row_bytes) {
  int threads = 4;
  while (threads * kCopyBytes < row_bytes) threads *= 2;
  return threads;
}

}  // namespace pat
