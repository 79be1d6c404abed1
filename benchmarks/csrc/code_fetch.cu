// What code costs that has not run for a while, by how far behind the kernel's start it lies:
//
//     nvcc -O3 -std=c++17 -arch=native benchmarks/csrc/code_fetch.cu -o code_fetch && ./code_fetch
//
// A kernel of 224 blocks of 64 multiplications each, about 1.1 KB of code, runs 16 of them that follow one another, one warp an SM. Before it
// another kernel of 256 KB evicts its code from the instruction caches; and where it says so, L2 is emptied by reading. Cycles of the
// median SM, medians of five.

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "timing.cuh"

constexpr int kBlocks = 224, kSpan = 16, kStep = 4, kRuns = 5, kThreads = 32;

#define PAT_8                                                                                           \
  "fma.rn.f32 a, a, b, c;\n fma.rn.f32 d, d, b, c;\n fma.rn.f32 a, a, c, b;\n fma.rn.f32 d, d, c, b;\n" \
  "fma.rn.f32 a, a, b, c;\n fma.rn.f32 d, d, b, c;\n fma.rn.f32 a, a, c, b;\n fma.rn.f32 d, d, c, b;\n"
#define PAT_64 PAT_8 PAT_8 PAT_8 PAT_8 PAT_8 PAT_8 PAT_8 PAT_8

// `kNumber` makes each block another code.
template <int kNumber>
__device__ __forceinline__ float block(float x, float y) {
  float result;
  asm volatile("{\n.reg .f32 a, b, c, d;\nmov.f32 a, %1;\nmov.f32 b, %2;\nmov.f32 c, %3;\nmov.f32 d, %2;\n" PAT_64
               "add.f32 %0, a, d;\n}\n"
               : "=f"(result)
               : "f"(x), "f"(y), "f"(float(kNumber)));
  return result;
}

// Blocks lie in the order of their numbers: the branches between them halve the range.
template <int kFirst, int kCount>
__device__ __forceinline__ float choose(int number, float x, float y) {
  if constexpr (kCount == 1) {
    return block<kFirst>(x, y);
  } else {
    constexpr int kHalf = kCount / 2;
    if (number >= kFirst + kHalf) return choose<kFirst + kHalf, kCount - kHalf>(number, x, y);
    return choose<kFirst, kHalf>(number, x, y);
  }
}

__global__ void run_blocks(int first, float x, float* out, long long* cycles) {
  const long long begin = clock64();
  float result = 0;
#pragma unroll 1
  for (int i = 0; i < kSpan; ++i) result += choose<0, kBlocks>(first + i, x, result);
  out[blockIdx.x * kThreads + threadIdx.x] = result;
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - begin;
}

template <int... kNumbers>
__device__ __forceinline__ float all_blocks(float x, std::integer_sequence<int, kNumbers...>) {
  float result = 0;
  ((result += block<1000 + kNumbers>(x, result)), ...);
  return result;
}

__global__ void evict_code(float x, float* out) {
  out[blockIdx.x * kThreads + threadIdx.x] = all_blocks(x, std::make_integer_sequence<int, 256>());
}

int main() {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  float* out;
  long long* cycles;
  CHECK(cudaMalloc(&out, sms * kThreads * sizeof(float)));
  CHECK(cudaMalloc(&cycles, sms * sizeof(long long)));
  const EmptyL2 empty_l2;
  std::vector<long long> of_sms(sms), runs(kRuns);
  std::printf("first block  cycles, L2 warm  cycles, L2 cold\n");
  for (int first = 0; first + kSpan <= kBlocks; first += kStep) {
    std::printf("%11d", first);
    for (const bool cold : {false, true}) {
      for (long long& run : runs) {
        evict_code<<<sms, kThreads>>>(1, out);
        if (cold) empty_l2();
        run_blocks<<<sms, kThreads>>>(first, 1, out, cycles);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(of_sms.data(), cycles, sms * sizeof(long long), cudaMemcpyDeviceToHost));
        std::nth_element(of_sms.begin(), of_sms.begin() + sms / 2, of_sms.end());
        run = of_sms[sms / 2];
      }
      std::nth_element(runs.begin(), runs.begin() + kRuns / 2, runs.end());
      std::printf("%17lld", runs[kRuns / 2]);
    }
    std::printf("\n");
  }
}
