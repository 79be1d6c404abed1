// What modules begin with whatever their variant, compiled once for all of them (emulated.py).
#pragma once

#include <dlpack/dlpack.h>

// tvm-ffi inlines the conversion of every argument, where a kernel's caller has 22: half of what compiling takes.
#include <tvm/ffi/base_details.h>
#undef TVM_FFI_INLINE
#define TVM_FFI_INLINE inline

#define kDLCUDA kDLCPU  // tensors are in the host's memory

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "ptx.cuh"
