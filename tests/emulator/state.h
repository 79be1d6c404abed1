// What a machine knows of a CTA's threads, warps and barriers (machine.h).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <vector>

namespace emulator {

constexpr int kWarpSize = 32;

// The change of the kernels that there is, if any (emulated.py). Static: each module has its own, also within one process.
static int planted = -1;

// What a thread has asked for and need not have happened yet, in order: a copy to shared memory (of zeros, if from
// nowhere), the end of a group of copies, or an arrival at a barrier when all before is done.
struct Pending {
  enum Kind { kCopy, kCommit, kArrive } kind;
  uint32_t to = 0;
  const void* from = nullptr;
  int bytes = 0;
};

// A warp's part of a warpgroup's product, by lane; not done before it is waited for.
struct Product {
  float* sums[kWarpSize];
  float before[kWarpSize][32];  // sums, which are NaN meanwhile; of the first product in flight for them
  uint32_t left[kWarpSize][4];  // registers, or a descriptor
  uint32_t right;
  bool registers, accumulate, first, transposed;  // left, in shared memory, with its rows contiguous
  int columns;
  const float* numbers;  // of 16 bits
};

struct Thread {
  unsigned index;
  bool started = false, lazy = false;  // others mostly overtake lazy ones, whole warps of them
  int registers;
  bool met = true;  // others, at a barrier, since its registers changed
  ucontext_t start;
  jmp_buf at;
  std::deque<Pending> pending;

  int lane() const { return int(index % kWarpSize); }
  int warp() const { return int(index / kWarpSize); }
};

struct Warp {
  int arrived = 0;
  const void* instruction = nullptr;
  alignas(16) uint8_t in[kWarpSize][64], out[kWarpSize][32];
  std::vector<Thread*> waiting;
  std::deque<std::vector<Product>> products;  // groups; the last one is not committed yet
};

struct NamedBarrier {
  int arrived = 0, expected = 0, count = 0, result = 0;
  std::vector<Thread*> waiting;
};

// A barrier in shared memory.
struct MemoryBarrier {
  uint32_t expected : 31, phase : 1;
  uint32_t missing;
};
static_assert(sizeof(MemoryBarrier) == 8);

}  // namespace emulator
