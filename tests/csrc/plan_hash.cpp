// Plans random batches and prints one number of all plans: whatever vectors the processor has, they are the same.

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "../../sglang_pat/csrc/packing/scheduler.h"

int main() {
  constexpr int kBatch = 200, kPlans = 40, kInts = 1 << 17;
  std::mt19937 random(7);
  uint64_t hash = 1469598103934665603ull;  // FNV-1a
  for (int plan = 0; plan < kPlans; ++plan) {
    pat::Config config;
    config.token_bytes = 4096, config.part_bytes = 33024, config.turn_price = 50000, config.warp_queries = 4,
    config.few_queries = 4, config.narrow_first_price = 1000000, config.warp_tokens = 16;
    config.group = plan % 2 ? 4 : 32, config.runs = 8, config.workers = 132, config.max_queries = 48;
    config.policy = pat::Policy::kOptimal;
    for (int queries = 0; queries <= config.max_queries; ++queries) {
      config.pack_prices.tokens.push_back(4096 + 150 * queries);
      config.pack_prices.starts.push_back(queries > 4 ? 90000 : 9000);
      config.short_tokens.push_back(queries > 4 ? 40 : 0);
    }
    // Queries of more than 16 rows are run in slices if they are short.
    if (config.group == 32) config.slices_tokens = 300, config.slice_rows = 16, config.warp_queries = 0;
    config.pack_prices.slices_token = 5000, config.pack_prices.slices_start = 20000;
    config.bin_prices = config.pack_prices;
    config.query_tiles = {8, 16, 64, 128, 192}, config.kv_tile = 64;
    config.check();
    std::vector<int32_t> first(kInts), second(kInts);
    pat::Scheduler scheduler(config, {{first.data(), kInts}, {second.data(), kInts}}, kBatch, 1 << 20);
    std::vector<int64_t> nodes = {pat::kRootId}, ends = {0}, requests, seq_lens;
    for (int request = 0; request < kBatch; ++request) {
      const size_t parent = random() % 3 == 0 ? nodes.size() - 1 : random() % nodes.size();
      const int64_t node = int64_t(nodes.size()), length = 1 + random() % 200;
      scheduler.insert(node, nodes[parent], length, node, plan);
      nodes.push_back(node), ends.push_back(ends[parent] + length);
      const size_t path = random() % 2 ? nodes.size() - 1 : random() % nodes.size();
      scheduler.bind(request, nodes[path]);
      requests.push_back(request), seq_lens.push_back(ends[path] + 1 + random() % 500);
      scheduler.expect(request, seq_lens.back());
    }
    const int buffer = int(scheduler.take(requests.data(), seq_lens.data(), kBatch, 0, false).buffer);
    const std::vector<int32_t>& out = buffer ? second : first;
    for (int i = 0; i < out[pat::kPartOffsets] + kBatch + 1; ++i) hash = (hash ^ uint32_t(out[i])) * 1099511628211ull;
  }
  std::printf("%llx\n", static_cast<unsigned long long>(hash));
}
