// How the benchmarks of this folder check calls of CUDA and time kernels.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

// Microseconds of `launch`: the median of `runs`, in front of each of which there is `prepare`; the first `dropped` do not count.
template <typename Launch, typename Prepare>
double median_us(Launch launch, Prepare prepare, int runs, int dropped) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < runs; ++i) {
    prepare();
    CHECK(cudaEventRecord(begin));
    launch();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= dropped) times.push_back(ms * 1e3f);
  }
  CHECK(cudaGetLastError());
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  return times[times.size() / 2];
}

__global__ void read_all(const float4* from, size_t count, float* out) {
  float sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    sum += from[i].x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Empties the L2 cache of a GPU by reading: what was written would have to be put back into memory.
class EmptyL2 {
 public:
  EmptyL2() {
    CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaMalloc(&memory_, kBytes));
    CHECK(cudaMalloc(&out_, sms_ * 2 * kThreads * sizeof(float)));
  }
  void operator()() const { read_all<<<sms_ * 2, kThreads>>>(memory_, kBytes / sizeof(float4), out_); }

 private:
  static constexpr size_t kBytes = 256 << 20;
  static constexpr int kThreads = 1024;
  int sms_;
  float4* memory_;
  float* out_;
};
