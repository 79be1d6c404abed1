// nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I sglang_pat/csrc/cuda -shared -Xcompiler -fPIC -o lowbit.so
#include "lowbit.cuh"

namespace {

template <typename Kernel>
cudaError_t launch(Kernel kernel, int grid, int threads, size_t shared, cudaStream_t stream, bool dependent,
                   const lowbit::Params& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = dependent;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <int kWarps, int kStages, bool kBulk>
int run(lowbit::Params p, int sms, cudaStream_t stream) {
  constexpr auto kernel = lowbit::forward<kWarps, kStages, kBulk>;
  constexpr size_t shared = sizeof(lowbit::Memory<kWarps, kStages, kBulk>);
  static_assert(shared <= 227 << 10);
  p.warps = sms * kWarps;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (error == cudaSuccess) error = launch(kernel, sms, kWarps * 32, shared, stream, false, p);
  if (error == cudaSuccess)
    error = launch(lowbit::merge, p.requests * p.kv_heads * lowbit::kGroup, 128, 0, stream, true, p);
  return int(error);
}

}  // namespace

extern "C" int lowbit_decode(int variant, const void* q, const void* records, const void* table, void* out, void* parts,
                             void* lse2, int requests, int kv_heads, int pages, float scale_log2, int sms, void* stream) {
  const lowbit::Params p{static_cast<const __nv_bfloat16*>(q),
                         static_cast<const uint8_t*>(records),
                         static_cast<const int32_t*>(table),
                         static_cast<__nv_bfloat16*>(out),
                         static_cast<__half*>(parts),
                         static_cast<float*>(lse2),
                         requests,
                         kv_heads,
                         pages,
                         0,
                         scale_log2};
  const auto s = static_cast<cudaStream_t>(stream);
  switch (variant) {
    case 0:
      return run<12, 4, true>(p, sms, s);
    case 1:
      return run<16, 3, true>(p, sms, s);
    case 2:
      return run<8, 6, true>(p, sms, s);
    case 3:
      return run<12, 4, false>(p, sms, s);
    default:
      return -1;
  }
}
