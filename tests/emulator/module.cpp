// csrc/cuda/module.cu for the host: a GPU of as many SMs as `set` says, each of which runs a CTA of forward and four of merge.
#include <dlpack/dlpack.h>

// tvm-ffi inlines the conversion of every argument, where a kernel's caller has 22: half of what compiling takes.
#include <tvm/ffi/base_details.h>
#undef TVM_FFI_INLINE
#define TVM_FFI_INLINE inline

#define kDLCUDA kDLCPU  // tensors are in the host's memory

#include "cuda/module.cu"

#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

namespace pat {
alignas(1024) thread_local uint8_t bytes[emulator::kSharedBytes];
}

namespace {

std::atomic<int> sms{4};
std::atomic<uint64_t> seed{0};

// Machines, whose threads' stacks take long to get, for the next kernel.
class Machines {
 public:
  std::unique_ptr<emulator::Machine> take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_.empty()) return std::make_unique<emulator::Machine>();
    auto machine = std::move(free_.back());
    free_.pop_back();
    return machine;
  }
  void give_back(std::unique_ptr<emulator::Machine> machine) {
    const std::lock_guard<std::mutex> guard(mutex_);
    free_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<emulator::Machine>> free_;
} machines;

// Every CTA of a kernel, several at a time.
void run(const std::function<void()>& kernel, unsigned grid, unsigned threads) {
  const uint64_t launch = seed++;
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(launch));
  std::atomic<unsigned> next{0};
  std::mutex mutex;
  std::string error;
  const auto work = [&] {
    auto machine = machines.take();
    emulator::machine = machine.get();
    for (unsigned at; (at = next++) < grid;) {
      const unsigned block = order[at];
      try {
        machine->run(kernel, block, grid, threads, pat::bytes, launch << 32 | block);
      } catch (const std::runtime_error& failed) {
        const std::lock_guard<std::mutex> guard(mutex);
        error = failed.what();
        next = grid;
      }
    }
    machines.give_back(std::move(machine));
  };
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < std::min(grid, std::thread::hardware_concurrency()); ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
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
