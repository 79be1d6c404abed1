// Counts allocations of the native scheduler while requests come and go; prints plans, all allocations, and those
// after the first two rounds.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "../../sglang_pat/csrc/packing/scheduler.h"

namespace {
std::atomic<int64_t> allocations{0};
}

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  ++allocations;
  const size_t unit = size_t(alignment);
  if (void* memory = std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

int main() {
  constexpr int kBatch = 64, kSeqLen = 2000;
  int plans = 0;
  int64_t steady = 0;
  for (const pat::Policy policy : {pat::Policy::kQuery, pat::Policy::kNaive, pat::Policy::kPat, pat::Policy::kOptimal}) {
    pat::Config config;
    config.token_bytes = 4096, config.part_bytes = 33024, config.turn_price = 0, config.warp_queries = 0,
    config.few_queries = 32;
    config.group = 4, config.runs = 8, config.workers = 132, config.max_queries = 32, config.policy = policy;
    config.pack_prices.tokens.assign(33, 4096), config.pack_prices.starts.assign(33, 80000),
        config.short_tokens.assign(33, 0);
    config.bin_prices = config.pack_prices;
    config.query_tiles = {16, 128}, config.kv_tile = 64, config.flat = true;
    std::vector<int32_t> first(1 << 16), second(1 << 16);
    pat::Scheduler scheduler(config, {{first.data(), 1 << 16}, {second.data(), 1 << 16}}, kBatch, 1 << 20);
    std::vector<int64_t> seq_lens(kBatch, kSeqLen);
    scheduler.insert(1, pat::kRootId, 500, 1, 1);
    int64_t node = 1;
    std::vector<int64_t> running;
    running.reserve(kBatch);
    const auto join = [&] {
      ++node;
      scheduler.insert(node, 1, 300, node, 0);
      running.push_back(int64_t(running.size()));
      scheduler.bind(running.back(), node);
      scheduler.expect(running.back(), kSeqLen);
    };
    const auto step = [&](bool ahead) {
      if (ahead) scheduler.prepare(0, pat::kLeastSteps);
      scheduler.take(running.data(), seq_lens.data(), int64_t(running.size()), 1, false);
      ++plans;
    };
    const auto round = [&] {
      for (int i = 0; i < 20; ++i) {
        scheduler.release(running.back());
        running.pop_back();
        step(i % 2);
      }
      for (int i = 0; i < 20; ++i) {
        join();
        scheduler.split(node, 1000000 + node, 100, -node, 0);
        step(i % 2);
      }
    };
    for (int i = 0; i < kBatch; ++i) join();
    step(true);
    round();
    round();
    const int64_t before = allocations;
    for (int i = 0; i < 20; ++i) round();
    steady += allocations - before;
  }
  std::printf("%d %ld %ld\n", plans, long(allocations), long(steady));
  return 0;
}
