// Hopper's wgmma, m64n64k16 with float32 accumulators (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). One
// shape is enough: 64 columns keep the tensor cores busy, and a panel of 128-byte swizzled rows is 64 columns wide.
// products.cuh calls it; tests/emulator has a replacement.
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAT_WGMMA 1
#endif

namespace pat {

// Matrix descriptor of a swizzled panel: eight rows of 128 bytes are a unit, 1,024 bytes apart. The lower half has the
// address; the upper half is constant.
__device__ __forceinline__ uint32_t panel_descriptor(uint32_t address) {
  constexpr uint32_t kLeading = 1 << 16;
  return kLeading | (address & 0x3FFFF) >> 4;
}
#define PAT_DESCRIPTOR_HIGH "0x40000040"  // 128-byte swizzle, and 1,024 bytes over 16

constexpr uint32_t descriptor_offset(int bytes) { return uint32_t(bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define PAT_D32                                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PAT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PAT_OUT PAT_D4(0), PAT_D4(4), PAT_D4(8), PAT_D4(12), PAT_D4(16), PAT_D4(20), PAT_D4(24), PAT_D4(28)

// d = a b^T (+ d where `accumulate`): a is [64, 16], b is [64, 16], both in shared memory with the product's k contiguous.
// d += a b: a is [64, 16] in registers, b is [16, 64] in shared memory with the columns contiguous.
// clang-format off
#define PAT_WGMMA_FOR(TYPE, NAME)                                                                                 \
  __device__ __forceinline__ void wgmma_nt(float (&d)[32], uint32_t a, uint32_t b, int accumulate, TYPE) {        \
    asm volatile(                                                                                                 \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " PAT_DESCRIPTOR_HIGH "};\n"  \
        "mov.b64 b, {%33, " PAT_DESCRIPTOR_HIGH "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME     \
        " " PAT_D32 ", a, b, p, 1, 1, 0, 0;\n}\n"                                                                  \
        : PAT_OUT                                                                                                 \
        : "r"(a), "r"(b), "r"(accumulate));                                                                       \
  }                                                                                                               \
  __device__ __forceinline__ void wgmma_nn(float (&d)[32], const uint32_t (&a)[4], uint32_t b, TYPE) {            \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%36, " PAT_DESCRIPTOR_HIGH "};\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " PAT_D32                          \
                 ", {%32, %33, %34, %35}, b, 1, 1, 1, 1;\n}\n"                                                   \
                 : PAT_OUT                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                           \
  }

#if PAT_WGMMA
PAT_WGMMA_FOR(__half, "f16")
PAT_WGMMA_FOR(__nv_bfloat16, "bf16")
#else
// For the host's compiler, which reads kernels that it does not compile.
template <typename T>
__device__ void wgmma_nt(float (&d)[32], uint32_t a, uint32_t b, int accumulate, T);
template <typename T>
__device__ void wgmma_nn(float (&d)[32], const uint32_t (&a)[4], uint32_t b, T);
#endif

// clang-format on
#undef PAT_WGMMA_FOR
#undef PAT_OUT
#undef PAT_D4
#undef PAT_D32

}  // namespace pat
