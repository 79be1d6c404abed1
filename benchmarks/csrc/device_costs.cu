// What reading scattered KV, a work item and a merge part cost:
//
//     nvcc -O3 -std=c++17 -arch=native benchmarks/csrc/device_costs.cu -o costs && ./costs
//
// A persistent forward without arithmetic: every CTA takes its items one after the other, reads an item, its slots, then
// K and V rows (page size 1, 8 KV heads, dim 128, 16 bit) through a pipeline of asynchronous copies, and writes a part.
// Time per item is fitted as a + b * tokens; a is what an item costs beyond its bytes. `across` lets the copies run ahead
// over the ends of items. The merge reads parts and writes outputs: likewise.

#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "timing.cuh"

constexpr int kDim = 128, kHeads = 8, kQueryHeads = 32, kThreads = 128, kRows = 16;
constexpr int kRowBytes = kDim * 2;

struct Item {
  int start, end, row;
};

// Goes through the tiles of a CTA's tasks; a task is an item and a KV head.
template <int kTile>
struct Cursor {
  const Item* items;
  const int* req_to_token;
  int num_tasks, width, task, tile = 0, tiles = 0, tokens = 0, head = 0;
  const int* slots = nullptr;

  __device__ void open() {
    if (task >= num_tasks) return;
    const Item item = items[task / kHeads];
    head = task % kHeads;
    slots = req_to_token + int64_t(item.row) * width + item.start;
    tokens = item.end - item.start;
    tiles = (tokens + kTile - 1) / kTile;
    tile = 0;
  }
  __device__ bool done() const { return task >= num_tasks; }
  __device__ void next() {
    if (++tile < tiles) return;
    task += gridDim.x;
    open();
  }
};

template <int kTile, int kStages, bool kAcross>
__global__ void __launch_bounds__(kThreads) forward(const Item* items, int num_items, const int* req_to_token, int width,
                                                    const char* k, const char* v, float* parts) {
  extern __shared__ char smem[];
  constexpr int kChunks = kRowBytes / 16, kTokensAtOnce = kThreads / kChunks;
  const int offset = threadIdx.x % kChunks * 16, first = threadIdx.x / kChunks;
  Cursor<kTile> reader{items, req_to_token, num_items * kHeads, width, int(blockIdx.x)}, writer = reader;
  reader.open();
  writer.open();
  float sum = 0;
  int stage_in = 0, stage_out = 0;
  constexpr int kTokens = kTile / kTokensAtOnce;
  int slots[kTokens];
  // The slots of a tile are read while the tile before is copied: their latency would otherwise stand before every copy.
  const auto read_slots = [&] {
    if (reader.done()) return;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int at = reader.tile * kTile + first + i * kTokensAtOnce;
      slots[i] = reader.slots[min(at, reader.tokens - 1)];
    }
  };
  read_slots();
  // Copies the reader's tile and moves on; across items only where asked to.
  const auto copy = [&] {
    if (!reader.done() && (kAcross || reader.task == writer.task)) {
      char* to = smem + stage_in * kTile * kRowBytes * 2;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int token = first + i * kTokensAtOnce;
        const int64_t from = (int64_t(slots[i]) * kHeads + reader.head) * kRowBytes + offset;
        const int bytes = reader.tile * kTile + token < reader.tokens ? 0 : 16;  // zeros beyond the item's end
        __pipeline_memcpy_async(to + token * kRowBytes + offset, k + from, 16, bytes);
        __pipeline_memcpy_async(to + (kTile + token) * kRowBytes + offset, v + from, 16, bytes);
      }
      stage_in = (stage_in + 1) % kStages;
      reader.next();
      read_slots();
    }
    __pipeline_commit();
  };
  while (!writer.done()) {
    if (!kAcross || stage_out == stage_in)
      for (int i = 0; i < kStages - 1; ++i) copy();
    const int task = writer.task;
    while (writer.task == task) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();
      copy();
      const char* from = smem + stage_out * kTile * kRowBytes * 2;
      for (int i = 0; i < 4; ++i) sum += reinterpret_cast<const float*>(from)[threadIdx.x + i * 1024];
      stage_out = (stage_out + 1) % kStages;
      writer.next();
    }
    float* part = parts + int64_t(task) * kRows * kDim;
    for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) part[i] = sum + float(i);
    if (!kAcross) {
      __pipeline_wait_prior(0);
      __syncthreads();
      stage_in = stage_out = 0;
    }
  }
}

// One warp for each (query, head), as many parts each as asked.
__global__ void merge(const float* parts, const float* lse, int num_parts, int total, float* out) {
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (warp >= total) return;
  const int query = warp / kQueryHeads, head = warp % kQueryHeads;
  float4 sum = make_float4(0, 0, 0, 0);
  float weight = 0, top = -1e30f;
  for (int part = 0; part < num_parts; ++part) {
    const int64_t at = (int64_t(query) * num_parts + part) * kQueryHeads + head;
    const float l = lse[at], higher = fmaxf(top, l), scale = exp2f(top - higher), factor = exp2f(l - higher);
    const float4 x = reinterpret_cast<const float4*>(parts + at * kDim)[lane];
    sum.x = sum.x * scale + x.x * factor, sum.y = sum.y * scale + x.y * factor;
    sum.z = sum.z * scale + x.z * factor, sum.w = sum.w * scale + x.w * factor;
    weight = weight * scale + factor, top = higher;
  }
  sum.x /= weight, sum.y /= weight, sum.z /= weight, sum.w /= weight;
  reinterpret_cast<float4*>(out + int64_t(warp) * kDim)[lane] = sum;
}

// The first five runs warm up.
template <typename Launch>
double median_us(Launch launch) {
  return median_us(launch, [] {}, 25, 5);
}

struct Memory {
  char *k, *v;
  int* table;
  float* parts;
};

constexpr int64_t kSlots = 1 << 18;  // 1 GiB of K and V: beyond any L2

template <int kTile, int kStages, bool kAcross>
void time_forward(int sms, const Memory& memory) {
  const auto kernel = forward<kTile, kStages, kAcross>;
  const int smem = kStages * kTile * kRowBytes * 2;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  int ctas;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, smem));
  std::vector<double> lengths, times;
  double best = 0;
  for (const int tokens : {32, 64, 128, 256, 512, 2048}) {
    const int num_items = int(std::min<int64_t>(kSlots / tokens, 4096));
    std::vector<Item> items;
    for (int i = 0; i < num_items; ++i) items.push_back(Item{i * tokens, (i + 1) * tokens, 0});
    Item* device_items;
    CHECK(cudaMalloc(&device_items, items.size() * sizeof(Item)));
    CHECK(cudaMemcpy(device_items, items.data(), items.size() * sizeof(Item), cudaMemcpyHostToDevice));
    const double us = median_us([&] {
      kernel<<<ctas * sms, kThreads, smem>>>(device_items, num_items, memory.table, 0, memory.k, memory.v, memory.parts);
    });
    best = std::max(best, double(num_items) * tokens * kHeads * kRowBytes * 2 / us * 1e-6);
    lengths.push_back(tokens);
    times.push_back(us * sms / (double(num_items) * kHeads));
    CHECK(cudaFree(device_items));
  }
  const double slope = (times.back() - times[2]) / (lengths.back() - lengths[2]);
  std::printf("%6d%8d%8s%10d%10.2f%12.3f%12.0f |", kTile, kStages, kAcross ? "yes" : "no", ctas, best,
              times[2] - slope * lengths[2], (times[2] - slope * lengths[2]) / slope);
  for (const double time : times) std::printf("%8.2f", time);
  std::printf("\n");
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const int sms = device.multiProcessorCount;
  Memory memory;
  CHECK(cudaMalloc(&memory.k, kSlots * kHeads * kRowBytes));
  CHECK(cudaMalloc(&memory.v, kSlots * kHeads * kRowBytes));
  CHECK(cudaMemset(memory.k, 1, kSlots * kHeads * kRowBytes));
  CHECK(cudaMemset(memory.v, 1, kSlots * kHeads * kRowBytes));
  std::vector<int> slots(kSlots);
  for (int64_t i = 0; i < kSlots; ++i) slots[i] = int(i);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(0));
  CHECK(cudaMalloc(&memory.table, kSlots * sizeof(int)));
  CHECK(cudaMemcpy(memory.table, slots.data(), kSlots * sizeof(int), cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&memory.parts, int64_t(1) << 31));
  CHECK(cudaMemset(memory.parts, 0, int64_t(1) << 31));

  std::printf("%s, %d SMs\n", device.name, sms);
  std::printf("%6s%8s%8s%10s%10s%12s%12s | us of an SM per item of 32, 64, 128, 256, 512, 2048 tokens\n", "tile", "stages",
              "across", "CTAs/SM", "TB/s", "item us", "in tokens");
  time_forward<32, 2, false>(sms, memory);
  time_forward<32, 4, false>(sms, memory);
  time_forward<64, 2, false>(sms, memory);
  time_forward<64, 3, false>(sms, memory);
  time_forward<128, 2, false>(sms, memory);
  time_forward<32, 2, true>(sms, memory);
  time_forward<32, 3, true>(sms, memory);
  time_forward<32, 4, true>(sms, memory);
  time_forward<32, 6, true>(sms, memory);
  time_forward<64, 2, true>(sms, memory);
  time_forward<64, 3, true>(sms, memory);
  time_forward<64, 6, true>(sms, memory);
  time_forward<128, 2, true>(sms, memory);
  time_forward<128, 3, true>(sms, memory);

  float *lse, *out;
  CHECK(cudaMalloc(&lse, int64_t(1) << 27));
  CHECK(cudaMemset(lse, 0, int64_t(1) << 27));
  CHECK(cudaMalloc(&out, int64_t(1) << 28));
  std::printf("%8s%8s%10s%12s\n", "queries", "parts", "us", "TB/s");
  for (const int queries : {1, 64, 256, 1024})
    for (const int num_parts : {2, 4, 8, 16}) {
      const int total = queries * kQueryHeads;
      if (int64_t(total) * num_parts * kDim * 4 > (int64_t(1) << 31)) continue;
      const double us = median_us([&] { merge<<<(total + 7) / 8, 256>>>(memory.parts, lse, num_parts, total, out); });
      std::printf("%8d%8d%10.2f%12.2f\n", queries, num_parts, us, double(total) * (num_parts + 0.5) * kDim * 4 / us * 1e-6);
    }
  return 0;
}
