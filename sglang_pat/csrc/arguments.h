// What every executor asks of a decode step's tensors.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include "error.h"

namespace pat {

constexpr DLDataType kFloat32{kDLFloat, 32, 1}, kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kUint8{kDLUInt, 8, 1};
constexpr DLDevice kCpu{kDLCPU, 0};

// The GPU that a tensor should be on if it is on one.
inline DLDevice gpu_of(const tvm::ffi::TensorView& tensor) { return {kDLCUDA, tensor.device().device_id}; }

inline void check(const tvm::ffi::TensorView& tensor, const char* name, int ndim, DLDataType type, DLDevice device) {
  const DLDevice is = tensor.device();
  TVM_FFI_CHECK(is.device_type == device.device_type, ValueError)
      << name << " must be on the " << (device.device_type == kDLCPU ? "CPU" : "GPU");
  TVM_FFI_CHECK(is.device_id == device.device_id, ValueError)
      << name << " must be on GPU " << device.device_id << ", as the others are, not on GPU " << is.device_id;
  TVM_FFI_CHECK(tensor.ndim() == ndim, ValueError) << name << " must have " << ndim << " dimensions, not " << tensor.ndim();
  const DLDataType got = tensor.dtype();
  TVM_FFI_CHECK(got.code == type.code && got.bits == type.bits, ValueError) << name << " has the wrong dtype";
  TVM_FFI_CHECK(tensor.stride(ndim - 1) == 1, ValueError) << name << " must be contiguous in its last dimension";
}

// Tensors of sglang_pat/kernels/arguments.py. Unlike there, the scale of K is in that of scores already; `records` are empty where KV is not in pages.
struct KvView {
  tvm::ffi::TensorView k, v, records;
  double v_scale;  // of a GPU's; on a CPU it is applied behind the kernel
};
struct Tables {
  tvm::ffi::TensorView req_to_token, rows, seq_lens, masks;
};
struct Scores {
  double scale, logit_cap;
  tvm::ffi::TensorView sinks;
};

// A plan, and the workspace for its parts.
struct Plan {
  tvm::ffi::TensorView ints, partial, lse;
};

inline void check(const Plan& plan, const Tables& tables, const tvm::ffi::TensorView& q, const tvm::ffi::TensorView& k,
                  const tvm::ffi::TensorView& out, DLDataType parts, DLDevice device) {
  check(tables.req_to_token, "req_to_token", 2, kInt32, device);
  check(tables.rows, "rows", 1, kInt64, device);
  check(tables.seq_lens, "seq_lens", 1, kInt64, device);
  check(plan.ints, "plan", 1, kInt32, device);
  check(plan.partial, "partial", 3, parts, device);
  check(plan.lse, "lse", 2, kFloat32, device);
  TVM_FFI_CHECK(k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0, ValueError)
      << q.size(1) << " query heads are not a multiple of " << k.size(1) << " KV heads";
  TVM_FFI_CHECK(out.is_contiguous() && plan.partial.is_contiguous() && plan.lse.is_contiguous(), ValueError)
      << "out, partial and lse must be contiguous";
}

// Logits without values, one for each query head, or none at all.
inline void check_sinks(const tvm::ffi::TensorView& sinks, DLDataType type, int64_t heads, DLDevice device) {
  check(sinks, "sinks", 1, type, device);
  TVM_FFI_CHECK(sinks.size(0) == 0 || sinks.size(0) == heads, ValueError)
      << sinks.size(0) << " sinks are not one for each of " << heads << " query heads";
}

}  // namespace pat
