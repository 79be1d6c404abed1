// Wrappers of PTX instructions (PTX ISA 8.x): cp.async, mbarrier, named barriers, ldmatrix, mma.sync, conversions. Chapters
// are named where an operand layout matters. All kernels use it; tests/emulator has a replacement.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pat {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// cp.async: complete after `wait_copies`, whose clobber keeps the compiler from reading earlier.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// Writes zeros and reads nothing where `valid` is false.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

__device__ __forceinline__ void copy4_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

__device__ __forceinline__ void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}

// L2 policy evict-first.
__device__ __forceinline__ uint64_t leaves_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy16(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy));
}

// Into the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Generic-to-async proxy fence, between a barrier and wgmma: makes visible to wgmma what any thread wrote to shared memory
// before the barrier.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Bits of a __half and back; saturates.
__device__ __forceinline__ uint16_t half_bits(float x) {
  return __half_as_ushort(__float2half_rn(fminf(fmaxf(x, -65504), 65504)));
}
__device__ __forceinline__ float half_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Programmatic dependent launch: the next kernel in the stream may start; wait for the one before to be complete.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same value, opaque to the compiler: what depends on it is not computed far ahead of its use and then kept in
// registers.
__device__ __forceinline__ unsigned fresh(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <typename T>
__device__ __forceinline__ T* fresh(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Index of the thread in the CTA, and in its set of `kCount` threads; of the thread in its warp; of the warp in the CTA.
__device__ __forceinline__ int thread_of_cta() { return int(fresh(threadIdx.x)); }
template <unsigned kCount>
__device__ __forceinline__ int thread_of() {
  return int(fresh(threadIdx.x) % kCount);
}
__device__ __forceinline__ int lane_id() { return thread_of<32>(); }
__device__ __forceinline__ int warp_id() { return int(fresh(threadIdx.x) / 32); }

// Named barrier: waits for `threads` threads.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting.
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void nap() { asm volatile("nanosleep.u32 0;"); }

// setmaxnreg: releases this warpgroup's registers beyond `kRegisters` a thread, or waits for as many.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// mbarriers. Waits test the parity of a phase, 0 or 1.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Needed before a barrier is initialised again.
__device__ __forceinline__ void invalidate_barrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}

// `count` arrivals; a single one before compute capability 9.0.
__device__ __forceinline__ void arrive(uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}\n" ::"r"(barrier), "r"(count)
               : "memory");
#else
  arrive(barrier);
#endif
}

// Arrives when this thread's cp.async so far are complete.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define PAT_TRY_WAIT "mbarrier.try_wait.parity"  // sleeps a while
#else
#define PAT_TRY_WAIT "mbarrier.test_wait.parity"
#endif
__device__ __forceinline__ void wait_barrier(uint32_t barrier, int phase) {
  asm volatile("{\n.reg .pred done;\nagain_%=:\n" PAT_TRY_WAIT
               ".shared.b64 done, [%0], %1;\n@!done bra again_%=;\n}\n" ::"r"(barrier),
               "r"(phase)
               : "memory");
}
#undef PAT_TRY_WAIT

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// The inverse of `load_matrices`.
__device__ __forceinline__ void store_matrices(const uint32_t (&r)[4], uint32_t to) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Two matrices, as columns: the inverse of a transposed load.
__device__ __forceinline__ void store_matrices_transposed(uint32_t first, uint32_t second, uint32_t to) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second)
               : "memory");
}
#else
// For the host's compiler, which reads kernels that it does not compile.
__device__ void store_matrices(const uint32_t (&r)[4], uint32_t to);
__device__ void store_matrices_transposed(uint32_t first, uint32_t second, uint32_t to);
#endif

// Transposes a warp's 8 x 8 matrix of 16-bit values, a pair of neighbours of a row in each thread.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// (x & mask) | base as one lop3: from C++, ptxas makes two instructions if neither constant is in a register.
__device__ __forceinline__ uint32_t mask_or(uint32_t x, uint32_t mask, uint32_t base) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(base));
  return y;
}

// Pairs of __half.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const __half2 c = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(c);
}

// a * b + c, rounded once.
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Minimum of each; NaN if either is.
__device__ __forceinline__ uint32_t least_pair(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

__device__ __forceinline__ float2 to_floats(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four e4m3 as two pairs of __half.
__device__ __forceinline__ void e4m3_pairs(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  // A register for the upper half: shifting it down took one instruction more.
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  const auto pair = [](uint32_t spread) {
    // Shifted right by one bit, e4m3 is a __half 2^8 too small. NaN becomes 480.
    const uint32_t small = (spread & 0x80008000) | (spread & 0x7f007f00) >> 1;
    const __half2 numbers = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256));
    return reinterpret_cast<const uint32_t&>(numbers);
  };
  low = pair(__byte_perm(bytes, 0, 0x1404)), high = pair(__byte_perm(bytes, 0, 0x3424));
#endif
}

// A pair of __half, saturated.
__device__ __forceinline__ uint32_t saturated_half_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <typename T>
struct Half;

#define PAT_HALF(TYPE, PAIR, CONVERT, NAME)                                                                       \
  template <>                                                                                                     \
  struct Half<TYPE> {                                                                                             \
    static __device__ __forceinline__ uint32_t pack(float low, float high) {                                      \
      const PAIR pair = CONVERT(low, high);                                                                       \
      return reinterpret_cast<const uint32_t&>(pair);                                                             \
    }                                                                                                             \
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                         \
                   ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                         \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                               \
    }                                                                                                             \
  };
PAT_HALF(__half, __half2, __floats2half2_rn, "f16")
PAT_HALF(__nv_bfloat16, __nv_bfloat162, __floats2bfloat162_rn, "bf16")
#undef PAT_HALF

}  // namespace pat
