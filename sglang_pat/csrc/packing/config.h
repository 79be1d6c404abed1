// What a plan depends on besides the batch; sglang_pat/packing/config.py is where the numbers come from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pat {

// In the order of POLICIES in sglang_pat/packing/scheduler.py.
enum class Policy { kQuery, kNaive, kPat, kCompute, kOptimal };

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Config {
  int64_t token_bytes, part_bytes, turn;
  int group, kv_heads, workers, max_queries, few_queries, warp_queries;
  Policy policy;
  // [max_queries + 1]: what a token costs a work item with so many queries, what starting it costs, and up to how many
  // tokens it is better run by work items of `few_queries`.
  std::vector<int64_t> rates, items, short_tokens;
  std::vector<int> query_tiles, kv_tiles, kv_bounds;
  bool flat = false;  // all rates are equal, all starts too: no work item is bound by arithmetic

  // m for a work item of so many queries.
  int query_tile(int64_t queries) const {
    const auto tile = std::lower_bound(query_tiles.begin(), query_tiles.end(), queries * group);
    return tile == query_tiles.end() ? query_tiles.back() : *tile;
  }

  // n for so many tokens.
  int kv_tile(int64_t tokens) const {
    size_t n = 0;
    for (const int bound : kv_bounds) n += tokens > bound;
    return kv_tiles[n];
  }

  int64_t item_bytes(int64_t queries, int64_t tokens) const { return tokens * rates[queries] + items[queries]; }

  // In how many work items a pack is run.
  int64_t pieces(int64_t queries, int64_t tokens) const {
    const int64_t pieces = queries <= max_queries ? 1 : ceil_div(queries, max_queries);
    const int64_t size = pieces == 1 ? queries : ceil_div(queries, pieces);
    return tokens <= short_tokens[size] ? ceil_div(queries, few_queries) : pieces;
  }

  int64_t pack_bytes(int64_t queries, int64_t tokens) const {
    if (queries == 0) return 0;
    const int64_t count = pieces(queries, tokens);
    return count == 1 ? item_bytes(queries, tokens) : count * item_bytes(ceil_div(queries, count), tokens);
  }

  // PackConfig.bins: weighs idle workers against cut packs.
  int64_t bins(int64_t limit, double work, double cut) const {
    constexpr int64_t kMaxWaves = 8;  // MAX_WAVES in sglang_pat/packing/config.py
    const int64_t heads = kv_heads;
    int64_t best = std::max<int64_t>(1, std::min<int64_t>(limit, workers / heads));
    const auto cost = [&](int64_t bins, int64_t waves) {
      return work * double(waves) * double(workers) / double(bins * heads) + double(bins) * cut;
    };
    double least = cost(best, ceil_div(best * heads, workers));
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
      const int64_t count = waves * workers / heads;
      if (count <= 0 || count > limit || !(cost(count, waves) < least)) continue;
      best = count;
      least = cost(count, waves);
    }
    return best;
  }
};

}  // namespace pat
