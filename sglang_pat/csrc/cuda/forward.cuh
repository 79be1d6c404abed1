// Forward: persistent workers, each with the bins that the plan gives it, one KV head at a time (PAT §6). One kernel has
// one or several Q tiles and switches between them from work item to work item (BatchLLM §4.4 fuses likewise).
#pragma once

#include "feed.cuh"
#include "mma_tile.cuh"
#include "wgmma_tile.cuh"

namespace pat {

// The Q tiles of a kernel: powers of two, all in one number.
template <int kMs>
struct TileSet {
  static constexpr int kMaxM = kMs >= 128 ? 128 : kMs >= 64 ? 64 : kMs >= 32 ? 32 : 16;
  __device__ static constexpr bool has(int m) { return kMs & m; }
};

template <typename T, int kDim, int kTokens, int kM>
struct TileOf {
  using Type = MmaTile<T, kDim, kTokens, kM>;
};

#if PAT_WGMMA
template <typename T, int kDim>
struct TileOf<T, kDim, 64, 64> {
  using Type = WgmmaTile<T, kDim, 64, 64>;
};
template <typename T, int kDim>
struct TileOf<T, kDim, 64, 128> {
  using Type = WgmmaTile<T, kDim, 64, 128>;
};
#endif

// Shared memory of a worker. Panels are 1,024-byte aligned, as swizzled tiles must be.
template <int kDim, int kTokens, typename Tiles>
struct ForwardMemory {
  using S = Sizes<kDim, kTokens, Tiles::kMaxM>;
  alignas(1024) uint8_t ring[S::kUnits * S::kUnit];
  alignas(1024) uint8_t scratch[S::kScratch];  // Q of a wide item while it runs, then the warps' shares of its results
  alignas(1024) uint8_t narrow_q[2 * S::kNarrowQ];
  FeedMemory<kTokens> feed;
  struct {
    float top[kWarps][16], sum[kWarps][16];
  } statistics;
};

template <typename T, int kDim, int kTokens, typename Tiles>
class Worker {
  using Memory = ForwardMemory<kDim, kTokens, Tiles>;

 public:
  __device__ Worker(const Params& p, Memory& memory)
      : p_(p), memory_(memory), feed_(p, memory.feed, shared_address(memory.ring), shared_address(memory.narrow_q)) {}

  __device__ void run() {
    feed_.begin();
    for (int ordinal = 0; feed_.tokens(tile_) >= 0; ++ordinal) {
      const int m = feed_.item(ordinal).m;
      if constexpr (Tiles::has(16)) {
        if (m == 16) run_item<16>(ordinal);
      }
      if constexpr (Tiles::has(32)) {
        if (m == 32) run_item<32>(ordinal);
      }
      if constexpr (Tiles::has(64)) {
        if (m == 64) run_item<64>(ordinal);
      }
      if constexpr (Tiles::has(128)) {
        if (m == 128) run_item<128>(ordinal);
      }
    }
    wait_copies<0>();
  }

 private:
  template <int kM>
  __device__ __forceinline__ void run_item(int ordinal) {
    using Tile = typename TileOf<T, kDim, kTokens, kM>::Type;
    feed_.begin_item(fresh_thread());
    uint32_t q = feed_.narrow_q(ordinal);
    if constexpr (kM > kNarrowM) {
      q = shared_address(memory_.scratch);
      __syncthreads();  // the item before may still be summed up there
      feed_.copy_wide_q(ordinal, memory_.scratch);
    }
    Tile tile(fresh_thread(), q, reinterpret_cast<float*>(memory_.scratch),
              reinterpret_cast<typename Tile::Shared&>(memory_.statistics), p_);
    const int end = tile_ + max(1, (feed_.item(ordinal).tokens + kTokens - 1) / kTokens);
    feed_.wait();
    tile.begin();
    while (true) {
      const int tokens = feed_.tokens(tile_);
      tile.scores(feed_.unit(tile_, false), tokens);
      feed_.begin_item(fresh_thread());
      feed_.load_v(tile_ + 1);
      tile.weights(tokens);
      feed_.wait();
      tile.values(feed_.unit(tile_, true), tokens);
      feed_.begin_item(fresh_thread());
      feed_.load_k(tile_ + 2);
      tile.values_end(tokens);
      if (++tile_ == end) break;
      feed_.wait();
    }
    const Entry& entry = feed_.item(ordinal);
    tile.finish(Results<T, kDim>(p_, feed_.queries(ordinal), feed_.targets(ordinal), entry.count, entry.head));
  }

  const Params& p_;
  Memory& memory_;
  Feed<T, kDim, kTokens, Tiles> feed_;
  int tile_ = 0;
};

// Workers of one SM: what shared memory and registers of Hopper hold.
template <int kDim>
constexpr int kWorkersPerSm = kDim <= 64 ? 3 : kDim <= 128 ? 2 : 1;

template <typename T, int kDim, int kTokens, typename Tiles>
__global__ void __launch_bounds__(kThreads, kWorkersPerSm<kDim>) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  launch_dependents();
  Worker<T, kDim, kTokens, Tiles>(p, *reinterpret_cast<ForwardMemory<kDim, kTokens, Tiles>*>(memory)).run();
}

}  // namespace pat
