// The kernels of one `Variant`. module.cu launches them; sglang_pat/kernels/resources.py compiles them alone, without the
// host's code.
#pragma once

#include <cstddef>

#include "forward.cuh"
#include "kv/latent.cuh"
#include "kv/latent_mma.cuh"
#include "merge.cuh"
#include "kv/page.cuh"
#include "kv/page_store.cuh"
#include "kv/page_unpack.cuh"
#include "kv/page_wide.cuh"

namespace pat::kernels {

using Element = Variant::Element;
using Kv = KvFormat<Element, Variant::kKv>;

constexpr bool kHasWide = (Variant::kQueryTiles & kWideTiles) != 0;

template <typename Kv, bool kPages, bool kWide>
struct ForwardOf {
  using Memory = ForwardMemory<Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>;
  static constexpr auto kKernel = forward<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>;
  static constexpr int kThreads = threads(Variant::kDim), kRecordBytes = 0;
};
template <typename Kv>
struct ForwardOf<Kv, true, false> {
  static_assert(kIsPages<Kv> && Variant::kVDim == Variant::kDim && !Variant::kMasks && !Variant::kLimits);
  using Memory = PageMemory<Kv, Variant::kDim>;
  static constexpr auto kKernel = forward_pages<Element, Kv, Variant::kDim, Variant::kQueryTiles>;
  static constexpr int kThreads = kPageThreads, kRecordBytes = Memory::S::R::kBytes;
};
template <typename Kv>
struct ForwardOf<Kv, true, true> {
  static_assert(kIsPages<Kv> && Variant::kVDim == Variant::kDim && !Variant::kMasks && !Variant::kLimits);
  using Memory = WidePagesMemory<Kv, Variant::kDim>;
  static constexpr auto kKernel = forward_wide_pages<Element, Kv, Variant::kDim, Variant::kQueryTiles>;
  static constexpr int kThreads = threads(Variant::kDim), kRecordBytes = Record<Kv::kBits, Variant::kDim>::kBytes;
};
template <typename Kv, bool kHopper>
struct LatentForwardOf {
  using Mma = LatentMma<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>;
  using Memory = typename Mma::Memory;
  static constexpr auto kKernel = forward_latents_mma<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>;
  static constexpr int kThreads = kLatentMmaThreads, kRecordBytes = 0;
};
template <typename Kv>
struct LatentForwardOf<Kv, true> {
  using Memory = LatentMemory<Variant::kDim, Variant::kVDim>;
  static constexpr auto kKernel = forward_latents<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>;
  static constexpr int kThreads = kLatentThreads, kRecordBytes = 0;
};
using Forward =
    std::conditional_t<Variant::kLatent, LatentForwardOf<Kv, Variant::kArch == 900>, ForwardOf<Kv, kIsPages<Kv>, kHasWide>>;
using Memory = Forward::Memory;

constexpr auto kForward = Forward::kKernel;
constexpr int kForwardThreads = Forward::kThreads;
constexpr int kKvBytes = Kv::kBytes == 1 ? 1 : 2;  // element size of k and v; with pages they hold the tails, in 16 bits
// Merge: a CTA for each output while all of them run at once; then a warp for each; then a warp for several heads of a
// query, which has more loads in flight.
constexpr int kMergeRows = 4;
constexpr auto kMergeByCta = merge<Element, Variant::kVDim, true, 1>;
constexpr auto kMergeByWarp = merge<Element, Variant::kVDim, false, 1>;
constexpr auto kMergeSeveral = merge<Element, Variant::kVDim, false, kMergeRows>;

// Of pages of 4 or 2 bits.
template <typename Kv, bool kPages>
struct PageKernels {
  static constexpr std::nullptr_t kStore = nullptr, kUnpack = nullptr;
};
template <typename Kv>
struct PageKernels<Kv, true> {
  static constexpr auto kStore = store_tokens<Element, Kv::kBits, Variant::kDim>;
  static constexpr auto kUnpack = unpack_pages<Element, Kv::kBits, Variant::kDim>;
};

}  // namespace pat::kernels

// For resources.py, which reads it from the PTX.
extern "C" __device__ const int pat_shared_bytes = sizeof(pat::kernels::Memory);
