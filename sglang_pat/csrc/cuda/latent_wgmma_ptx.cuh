// Hopper's wgmma, m64nNk16 with few columns and both operands in shared memory, for the transposed products of narrow items
// over latents (kv/latent_narrow.cuh): beside wgmma_ptx.cuh, and with its descriptors. tests/emulator has a replacement.
#pragma once

#include "wgmma_ptx.cuh"

namespace pat {

#define PAT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PAT_LIST4 "%0, %1, %2, %3"
#define PAT_LIST8 PAT_LIST4 ", %4, %5, %6, %7"
#define PAT_LIST16 PAT_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PAT_OUT4 PAT_D4(0)
#define PAT_OUT8 PAT_OUT4, PAT_D4(4)
#define PAT_OUT16 PAT_OUT8, PAT_D4(8), PAT_D4(12)

// d = a b^T (+ d where `accumulate`): b is [N, 16] with the product's k contiguous; a is [64, 16] likewise, or where
// kTransposed [16, 64] with the rows contiguous.
// clang-format off
#define PAT_WGMMA_FOR(TYPE, NAME, N, COUNT, A, B, C)                                                             \
  template <bool kTransposed>                                                                                    \
  __device__ __forceinline__ void wgmma_few(float (&d)[COUNT], uint32_t a, uint32_t b, int accumulate, TYPE) {   \
    asm volatile(                                                                                                \
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" C ", 0;\nmov.b64 a, {%" A ", " PAT_DESCRIPTOR_HIGH \
        "};\nmov.b64 b, {%" B ", " PAT_DESCRIPTOR_HIGH "};\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."      \
        NAME "." NAME " {" PAT_LIST##COUNT "}, a, b, p, 1, 1, %" #COUNT ", 0;\n}\n"                              \
        : PAT_OUT##COUNT                                                                                         \
        : "n"(int(kTransposed)), "r"(a), "r"(b), "r"(accumulate));                                               \
  }
#define PAT_WGMMA_TYPE(TYPE, NAME)                   \
  PAT_WGMMA_FOR(TYPE, NAME, 8, 4, "5", "6", "7")     \
  PAT_WGMMA_FOR(TYPE, NAME, 16, 8, "9", "10", "11")  \
  PAT_WGMMA_FOR(TYPE, NAME, 32, 16, "17", "18", "19")

#if PAT_WGMMA
PAT_WGMMA_TYPE(__half, "f16")
PAT_WGMMA_TYPE(__nv_bfloat16, "bf16")
#else
// For the host's compiler, which reads kernels that it does not compile.
template <bool kTransposed, int kCount, typename T>
__device__ void wgmma_few(float (&d)[kCount], uint32_t a, uint32_t b, int accumulate, T);
#endif

// clang-format on
#undef PAT_WGMMA_TYPE
#undef PAT_WGMMA_FOR
#undef PAT_OUT16
#undef PAT_OUT8
#undef PAT_OUT4
#undef PAT_LIST16
#undef PAT_LIST8
#undef PAT_LIST4
#undef PAT_D4

}  // namespace pat
