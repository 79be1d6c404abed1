// One native module for each dtype, head dimension, architecture and set of tiles: PAT_TYPE, PAT_DIM, PAT_ARCH and
// PAT_QUERY_TILES come from the build (sglang_pat/kernels/cuda.py).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "forward.cuh"
#include "merge.cuh"

// For sglang_pat/kernels/resources.py, which reads it from the PTX.
extern "C" __device__ const int pat_shared_bytes = sizeof(pat::ForwardMemory<PAT_DIM, PAT_QUERY_TILES>);

namespace {

using tvm::ffi::TensorView;
using Element = PAT_TYPE;
using Memory = pat::ForwardMemory<PAT_DIM, PAT_QUERY_TILES>;

constexpr auto kForward = pat::forward<Element, PAT_DIM, PAT_QUERY_TILES>;
constexpr int kForwardThreads = pat::threads(PAT_DIM);
constexpr int kMergeThreads = 4 * pat::kWarpSize;
// With fewer outputs than this, several warps work on each: one for each of an H200's 528 warp schedulers.
constexpr int64_t kFewOutputs = 1024;

void check(cudaError_t error) { TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error); }

void check(const TensorView& tensor, const char* name, int ndim, DLDataType dtype) {
  TVM_FFI_CHECK(tensor.ndim() == ndim, ValueError) << name << " must have " << ndim << " dimensions";
  const DLDataType own = tensor.dtype();
  TVM_FFI_CHECK(own.code == dtype.code && own.bits == dtype.bits, ValueError) << name << " has the wrong dtype";
  TVM_FFI_CHECK(tensor.device().device_type == kDLCUDA, ValueError) << name << " must be on the GPU";
}

// Rows of the head dimension that 16-byte copies can read.
void check_rows(const TensorView& tensor, const char* name, DLDataType dtype) {
  check(tensor, name, 3, dtype);
  TVM_FFI_CHECK(tensor.size(2) == PAT_DIM, ValueError) << name << " must have heads of " << PAT_DIM;
  TVM_FFI_CHECK(tensor.stride(2) == 1 && tensor.stride(0) % 8 == 0 && tensor.stride(1) % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0,
                ValueError)
      << name << "'s heads must be contiguous and begin at multiples of 16 bytes";
}

struct Device {
  int sms, workers;  // workers: CTAs that run at the same time
};

const Device& device(int id) {
  static Device devices[64] = {};
  Device& d = devices[id];
  if (d.workers == 0) {
    check(cudaDeviceGetAttribute(&d.sms, cudaDevAttrMultiProcessorCount, id));
    check(cudaFuncSetAttribute(kForward, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory)));
    int ctas;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kForward, kForwardThreads, sizeof(Memory)));
    TVM_FFI_CHECK(ctas > 0, RuntimeError)
        << "this GPU has less shared memory than the " << sizeof(Memory) << " bytes that these tiles need";
    d.workers = ctas * d.sms;
  }
  return d;
}

template <typename Kernel>
void launch(Kernel kernel, int grid, int block, size_t shared, cudaStream_t stream, bool dependent,
            const pat::Params& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent;
  check(cudaLaunchKernelEx(&config, kernel, params));
}

pat::Params make_params(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                        const TensorView& req_to_token, const TensorView& rows, const TensorView& seq_lens,
                        const TensorView& plan, const TensorView& partial, const TensorView& lse, double scale,
                        double logit_cap) {
  const DLDataType f32{kDLFloat, 32, 1}, i32{kDLInt, 32, 1}, i64{kDLInt, 64, 1}, own = k.dtype();
  const DLDataType half{uint8_t(std::is_same_v<Element, __half> ? kDLFloat : kDLBfloat), 16, 1};
  check_rows(q, "q", half);
  check_rows(k, "k", half);
  check_rows(v, "v", half);
  check_rows(out, "out", half);
  check(req_to_token, "req_to_token", 2, i32);
  check(rows, "rows", 1, i64);
  check(seq_lens, "seq_lens", 1, i64);
  check(plan, "plan", 1, i32);
  check(partial, "partial", 3, f32);
  check(lse, "lse", 2, f32);
  TVM_FFI_CHECK(q.size(1) % k.size(1) == 0, ValueError)
      << q.size(1) << " query heads are not a multiple of " << k.size(1) << " KV heads";
  TVM_FFI_CHECK(out.is_contiguous() && partial.is_contiguous() && lse.is_contiguous() && plan.is_contiguous() &&
                    rows.is_contiguous() && seq_lens.is_contiguous() && req_to_token.stride(1) == 1,
                ValueError)
      << "out, partial, lse, plan, rows, seq_lens and the rows of req_to_token must be contiguous";
  pat::Params p;
  p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr(), p.out = out.data_ptr();
  p.partial = static_cast<float*>(partial.data_ptr()), p.lse = static_cast<float*>(lse.data_ptr());
  p.req_to_token = static_cast<const int32_t*>(req_to_token.data_ptr());
  p.rows = static_cast<const int64_t*>(rows.data_ptr());
  p.seq_lens = static_cast<const int64_t*>(seq_lens.data_ptr());
  p.plan = static_cast<const int32_t*>(plan.data_ptr());
  p.q_row = q.stride(0), p.q_head = q.stride(1);
  p.k_slot = uint32_t(k.stride(0) * 2), p.k_head = uint32_t(k.stride(1) * 2);
  p.v_slot = uint32_t(v.stride(0) * 2), p.v_head = uint32_t(v.stride(1) * 2);
  p.table_row = req_to_token.stride(0);
  p.out_rows = int(out.size(0)), p.heads = int(q.size(1)), p.kv_heads = int(k.size(1)), p.group = p.heads / p.kv_heads;
  p.group_inverse = uint32_t((65536 + p.group - 1) / p.group);
  constexpr double kLog2E = 1.4426950408889634;
  p.scale_log2 = float(scale * kLog2E);
  // The kernel caps scores before it scales them.
  p.cap = float(logit_cap / scale);
  p.cap_exponent = logit_cap > 0 ? float(2 * kLog2E * scale / logit_cap) : 0;
  return p;
}

// Forward, merge or one after the other, on the current stream.
void decode(TensorView q, TensorView k, TensorView v, TensorView out, TensorView req_to_token, TensorView rows,
            TensorView seq_lens, TensorView plan, TensorView partial, TensorView lse, double scale, double logit_cap,
            bool with_forward, bool with_merge, bool overlap) {
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  const pat::Params p = make_params(q, k, v, out, req_to_token, rows, seq_lens, plan, partial, lse, scale, logit_cap);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, q.device().device_id));
  if (with_forward)
    launch(kForward, device(q.device().device_id).workers, kForwardThreads, sizeof(Memory), stream, false, p);
  const int64_t outputs = int64_t(p.out_rows) * p.heads;
  if (!with_merge || outputs == 0) return;
  if (outputs < kFewOutputs)
    launch(pat::merge<Element, PAT_DIM, 4>, int(outputs), kMergeThreads, 0, stream, overlap, p);
  else
    launch(pat::merge<Element, PAT_DIM, 1>, int((outputs + 3) / 4), kMergeThreads, 0, stream, overlap, p);
}

// Writes SMs, workers, and of the forward kernel registers, bytes of local and of shared memory to an int64 host array.
void describe(int64_t id, TensorView out) {
  tvm::ffi::CUDADeviceGuard guard{int(id)};
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kForward));
  const Device& d = device(int(id));
  auto* to = static_cast<int64_t*>(out.data_ptr());
  to[0] = d.sms, to[1] = d.workers, to[2] = attributes.numRegs, to[3] = int64_t(attributes.localSizeBytes);
  to[4] = int64_t(sizeof(Memory));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, describe);
