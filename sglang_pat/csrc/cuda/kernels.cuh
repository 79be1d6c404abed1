// The kernels of one `Variant`. module.cu launches them; tests/resources.py compiles them alone, without the
// host's code.
#pragma once

#include <cstddef>

#include "kv/latent.cuh"
#include "kv/latent_mma.cuh"
#include "kv/page.cuh"
#include "kv/page_store.cuh"
#include "kv/page_unpack.cuh"
#include "kv/plain.cuh"
#include "merge.cuh"

namespace pat::kernels {

using Element = Variant::Element;
using Kv = KvFormat<Element, Variant::kKv>;

// How `forward` loads and computes this KV.
using Format = std::conditional_t<
    Variant::kLatent,
    std::conditional_t<Variant::kArch == 900, LatentKv<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>,
                       LatentMmaKv<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>>,
    std::conditional_t<kIsPages<Kv>, PageKv<Element, Kv, Variant::kDim, Variant::kQueryTiles>,
                       PlainKv<Element, Kv, Variant::kDim, Variant::kVDim, Variant::kQueryTiles>>>;
static_assert(!kIsPages<Kv> || (Variant::kVDim == Variant::kDim && !Variant::kMasks && !Variant::kLimits));
using Memory = Format::Memory;

constexpr auto kForward = kForwardOf<Format>;
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
