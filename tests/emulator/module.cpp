// csrc/cuda/module.cu for the host: a GPU of as many SMs as `set` says, each of which runs a CTA of forward and four of merge.
#include <prefix.h>

#include "cuda/module.cu"

#include <atomic>
#include <cstring>

namespace pat {
alignas(1024) thread_local uint8_t bytes[emulator::kSharedBytes];
}

namespace {

std::atomic<int> sms{4};
std::atomic<uint64_t> seed{0};

void run(const std::function<void()>& kernel, unsigned grid, unsigned threads) {
  const std::string error = emulator::launch(kernel, grid, threads, seed++, [] { return pat::bytes; });
  TVM_FFI_CHECK(error.empty(), RuntimeError) << error;
}

void set(int64_t count, int64_t first_seed) { sms = int(count), seed = uint64_t(first_seed); }
void plant(int64_t number) { emulator::planted = int(number); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set, set);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plant, plant);

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const auto start = [&](auto params) {
    const auto function = reinterpret_cast<void (*)(decltype(params))>(reinterpret_cast<uintptr_t>(kernel));
    run([=] { function(params); }, config->gridDim.x, config->blockDim.x);
  };
  // Kernels with parameters of their own are known by their block size.
  if (config->blockDim.x == pat::kStoreThreads && config->dynamicSmemBytes == 0)
    start(*static_cast<const pat::StoreParams*>(arguments[0]));
  else if (config->blockDim.x == pat::kUnpackThreads)
    start(*static_cast<const pat::UnpackParams*>(arguments[0]));
  else
    start(*static_cast<const pat::Params*>(arguments[0]));
  return cudaSuccess;
}
// So few that small batches are merged in each of the ways.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* ctas, const void*, int threads, size_t, unsigned) {
  *ctas = threads == pat::kMergeThreads ? 4 : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = sms;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
}
