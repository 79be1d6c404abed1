// How K and V of narrow items could come to shared memory: 16 bytes at a time (cp.async), as they do, or a row of 256 bytes by each lane
// (cp.async.bulk, which writes rows at a pitch of 272 bytes so that ldmatrix has no bank conflicts):
//
//     nvcc -O3 -std=c++17 -arch=sm_90a benchmarks/csrc/row_copies.cu -o row_copies && ./row_copies
//
// 12 warps an SM, each with two stages of 16 tokens (K and V, 8 KB) from anywhere in the pool, slots read two chunks ahead as in
// csrc/cuda/narrow_load.cuh. Instead of products a warp waits for so many cycles and reads eight numbers a lane. Medians of 15, L2 emptied by reading.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "timing.cuh"

constexpr int kWarps = 12, kTokens = 16, kStages = 2, kRow = 256, kPitch = 272, kHeads = 8, kSlot = kHeads * kRow;
constexpr int kStage = 2 * kTokens * kPitch;
constexpr size_t kShared = kWarps * kStages * kStage + kWarps * kStages * sizeof(uint64_t);

__device__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void init_barrier(uint32_t barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier)); }

__device__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

__device__ void copy_row(uint32_t to, const char* from, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(to),
               "l"(from), "r"(barrier)
               : "memory");
}

__device__ void copy16(uint32_t to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

template <bool kBulk>
__global__ void __launch_bounds__(kWarps * 32, 1)
    gather(const int* slots, int chunks, int cycles, const char* k, const char* v, float* out) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, number = blockIdx.x * kWarps + warp;
  const int head = number % kHeads;
  const uint32_t stages = shared_address(memory) + warp * kStages * kStage;
  const uint32_t barriers = shared_address(memory) + kWarps * kStages * kStage + warp * kStages * 8;
  if (kBulk && lane < kStages) init_barrier(barriers + lane * 8);
  if (kBulk) asm volatile("fence.proxy.async;");
  __syncwarp();
  const int* const own = slots + int64_t(number) * chunks * kTokens;
  const auto slot_of = [&](int chunk) { return chunk < chunks ? own[chunk * kTokens + lane % kTokens] : 0; };
  int ahead[2] = {slot_of(0), slot_of(1)};
  int asked = 0;
  const auto copy_next = [&] {
    const int slot = ahead[0];
    const uint32_t to = stages + asked % kStages * kStage;
    if (asked < chunks) {
      if constexpr (kBulk) {
        const uint32_t barrier = barriers + asked % kStages * 8;
        if (lane == 0) expect_bytes(barrier, 2 * kTokens * kRow);
        __syncwarp();
        copy_row(to + lane * kPitch, (lane < kTokens ? k : v) + int64_t(slot) * kSlot + head * kRow, barrier);
      } else {
        const int column = lane % 16, first = lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int64_t from = int64_t(__shfl_sync(~0u, slot, first + i)) * kSlot + head * kRow + column * 16;
          const uint32_t place = to + (first + i) * kPitch + column * 16;
          copy16(place, k + from);
          copy16(place + kTokens * kPitch, v + from);
        }
      }
    }
    if constexpr (!kBulk) asm volatile("cp.async.commit_group;");
    ++asked;
    ahead[0] = ahead[1], ahead[1] = slot_of(asked + 1);
  };
  for (int i = 0; i < kStages; ++i) copy_next();
  float sum = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if constexpr (kBulk) {
      wait_barrier(barriers + chunk % kStages * 8, chunk / kStages % 2);
    } else {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    }
    __syncwarp();
    const uint8_t* const from = memory + (warp * kStages + chunk % kStages) * kStage;
    for (int row = 0; row < 2 * kTokens; row += 4) sum += *reinterpret_cast<const float*>(from + row * kPitch + lane * 8);
    for (const long long begin = clock64(); clock64() - begin < cycles;) {
    }
    __syncwarp();
    copy_next();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const int sms = device.multiProcessorCount, warps = sms * kWarps;
  std::printf("%s\nchunks a warp, cycles a chunk: cp.async, cp.async.bulk, us (TB/s)\n", device.name);
  const int most = 16, pool = 1 << 19;
  char *k, *v;
  float* out;
  int* slots;
  CHECK(cudaMalloc(&k, size_t(pool) * kSlot));
  CHECK(cudaMalloc(&v, size_t(pool) * kSlot));
  CHECK(cudaMemset(k, 1, size_t(pool) * kSlot));
  CHECK(cudaMemset(v, 1, size_t(pool) * kSlot));
  CHECK(cudaMalloc(&out, sms * kWarps * 32 * sizeof(float)));
  CHECK(cudaMalloc(&slots, size_t(warps) * most * kTokens * sizeof(int)));
  CHECK(cudaFuncSetAttribute(gather<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared)));
  CHECK(cudaFuncSetAttribute(gather<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared)));
  std::vector<int> pages(pool);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(0));
  // Each slot once: no warp finds in L2 what another one read. A slot's eight heads are read by warps of their own slots.
  std::vector<int> all(size_t(warps) * most * kTokens);
  for (size_t i = 0; i < all.size(); ++i) all[i] = pages[i % pool];
  CHECK(cudaMemcpy(slots, all.data(), all.size() * sizeof(int), cudaMemcpyHostToDevice));
  const EmptyL2 empty_l2;
  for (const int cycles : {0, 400, 800}) {
    for (const int chunks : {1, 2, 4, 8, 16}) {
      const auto time = [&](auto kernel) {
        return median_us([&] { kernel<<<sms, kWarps * 32, kShared>>>(slots, chunks, cycles, k, v, out); }, empty_l2, 15, 0);
      };
      const double us[] = {time(gather<false>), time(gather<true>)};
      const double bytes = double(warps) * chunks * 2 * kTokens * kRow;
      std::printf("%3d %4d: %8.1f %8.1f (%.2f, %.2f)\n", chunks, cycles, us[0], us[1], bytes / us[0] * 1e-6,
                  bytes / us[1] * 1e-6);
    }
  }
}
