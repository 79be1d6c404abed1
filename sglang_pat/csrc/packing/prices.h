// What a plan depends on besides the batch; sglang_pat/packing/prices.py is where the numbers come from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "constants.h"

namespace pat {

// What a plan may be made of at most. A GPU has a few hundred workers, a tile a few hundred rows; prices are bytes
// that a worker moves in a time (PackConfig), some 33 in a nanosecond. With Scheduler::kMaxTokens no sum of them leaves 64 bits.
constexpr int64_t kMaxWorkers = 4096, kMaxTile = 4096, kMaxBatch = 1 << 20;
constexpr int64_t kMaxWarpTokens = 64;  // for each work item little beside Scheduler::kMaxTokens
constexpr int64_t kMaxTokenPrice = int64_t(1) << 22, kMaxItemPrice = int64_t(1) << 32;

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse(const char* name, int64_t value, int64_t least, int64_t most) {
  throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " to " + std::to_string(most) +
                              ", not " + std::to_string(value));
}

// `value`, which is checked: std::invalid_argument where it cannot be. Lengths of whole batches pass through here.
inline int64_t in_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) refuse(name, value, least, most);
  return value;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What work items cost, in bytes.
struct Prices {
  std::vector<int64_t> tokens, starts;         // [max_queries + 1]: a token, and start and end, of one with so many queries
  int64_t slices_token = 1, slices_start = 0;  // of one that is run in slices

  // What one more token costs a work item.
  int64_t growth(int64_t queries, bool slices) const { return slices ? slices_token : tokens[queries]; }

  // What a work item costs besides its tokens.
  int64_t fixed(int64_t queries, bool slices) const { return slices ? slices_start : starts[queries]; }

  // Throws std::invalid_argument where a price cannot be; `where` says which prices these are.
  void check(int max_queries, const std::string& where) const {
    const auto price = [&](const char* name, int64_t value, int64_t least, int64_t most) {
      in_range((name + where).c_str(), value, least, most);
    };
    for (const auto* prices : {&tokens, &starts})
      in_range("the number of prices", int64_t(prices->size()), max_queries + 1, max_queries + 1);
    for (int queries = 1; queries <= max_queries; ++queries) {
      price("a token's price", tokens[queries], 1, kMaxTokenPrice);
      price("a start's price", starts[queries], 0, kMaxItemPrice);
    }
    price("the price of slices", slices_token, 1, kMaxTokenPrice);
    price("the start of slices", slices_start, 0, kMaxItemPrice);
  }
};

// Which batches are planned without tiles of single warps: `WideSteps` (packing/tiles.py) for a config. Queries and tokens are those of the batch, times `runs`,
// but `ragged_tokens`, which one of its requests has at least on average.
struct WideLimits {
  int64_t small_queries = 0, small_tokens = 0, small_sharing = 1, small_draft_tokens = 0, little_shared_queries = 0,
          ragged_queries = 0, ragged_tokens = 0;

  // Whether they do for a batch that has so many tokens when each is read once.
  bool hold(const std::vector<int32_t>& seq_lens, int64_t batch_tokens, int runs) const {
    if (seq_lens.empty()) return false;
    const int64_t count = int64_t(seq_lens.size()) * runs;
    const int64_t own = std::accumulate(seq_lens.begin(), seq_lens.end(), int64_t(0));
    const bool small = count <= small_queries && batch_tokens * runs <= small_tokens;
    if (small && (batch_tokens * runs <= small_draft_tokens || own >= small_sharing * batch_tokens)) return true;
    if (100 * own > (100 + kLittlePercent) * batch_tokens) return false;
    if (count <= little_shared_queries) return true;
    if (count > ragged_queries || own < ragged_tokens * int64_t(seq_lens.size())) return false;
    const auto [shortest, longest] = std::minmax_element(seq_lens.begin(), seq_lens.end());
    return kRagged * int64_t(*longest - *shortest) > *longest;
  }
};

struct Config {
  int64_t token_bytes = 0, part_bytes = 0;  // traffic
  int64_t turn_price = 0, bin_end_price = 0, wave_price = 0;
  // From how much computing beyond reading on every second worker runs narrow items first; 0: none does.
  int64_t narrow_first_price = 0;
  int group = 1, runs = 1, workers = 1, max_queries = 1, few_queries = 1, warp_queries = 0;
  int rebalance_queries = 0;  // up to so many have work items into which packs are split where a bin is too long; or 0
  // A query of more than `slice_rows` rows, with up to `slices_tokens` tokens, is run in slices of so many.
  int64_t slices_tokens = -1;
  int slice_rows = 0;
  int64_t warp_tokens = 1;  // that a single warp computes at a time: a work item of fewer costs as much
  int window = 0;           // tokens that a query sees; 0: all
  int tails_queries = 1;    // that a work item with tails may have; 1: there is none
  int straddled_rows = 0;   // the rows of a pack are cut into work items at so many; 0: at whole queries
  int64_t grain = 1;        // KV positions between possible cuts
  int32_t piece = 0;        // requests are cut where positions are multiples of it, and nowhere else; 0: as is best
  int64_t kv_tile = 1;      // tokens that a worker computes at a time
  Policy policy = Policy::kOptimal;
  Prices pack_prices,
      bin_prices;  // when it is decided what is packed, and when packs are laid out in bins (PackConfig.for_bins)
  // [max_queries + 1]: up to how many tokens a work item with so many queries is better run by some of `few_queries`.
  std::vector<int64_t> short_tokens;
  std::vector<int> query_tiles;
  WideLimits wide_limits;
  std::shared_ptr<const Config> wide_only;  // what batches within the limits are planned with
  bool flat = false;                        // what a work item costs does not depend on its queries

  // Throws std::invalid_argument where prices cannot be, or numbers and lists do not belong together; says whether the config is flat.
  void check() {
    pack_prices.check(max_queries, "");
    bin_prices.check(max_queries, " in bins");
    in_range("the number of short_tokens", int64_t(short_tokens.size()), max_queries + 1, max_queries + 1);
    for (int queries = 1; queries <= max_queries; ++queries) in_range("short_tokens", short_tokens[queries], 0, INT32_MAX);
    if (straddled_rows > 0) {
      in_range("straddled_rows", straddled_rows, group + 1, UINT8_MAX);
      in_range("max_queries", max_queries, 2 + (straddled_rows - 2) / group, kMaxTile);
      if (piece > 0 || tails_queries > 1 || slices_tokens >= 0 || rebalance_queries > 1)
        throw std::invalid_argument(
            "rows of a pack are cut in no plans in pieces, with tails, slices or packs that are split");
    }
    if (piece % grain != 0) throw std::invalid_argument("a piece must be a multiple of the positions between cuts");
    in_range("the number of query tiles", int64_t(query_tiles.size()), 1, kMaxTile);
    for (const int tile : query_tiles) in_range("a tile", tile, 1, straddled_rows > 0 ? UINT8_MAX : kMaxTile);
    if (!std::is_sorted(query_tiles.begin(), query_tiles.end())) throw std::invalid_argument("tiles must ascend");
    const auto equal = [&](const std::vector<int64_t>& prices) {
      return std::count(prices.begin() + 1, prices.end(), prices[1]) == max_queries;
    };
    flat = equal(pack_prices.tokens) && equal(pack_prices.starts) && slices_tokens < 0 &&
           (warp_tokens == 1 || warp_queries == 0) && straddled_rows == 0;
  }

  // Plans batches within the limits with `config`, which is of the same device and model. Throws std::invalid_argument where it cannot be.
  void plan_wide(const WideLimits& limits, Config config) {
    const auto equal = [](const char* what, int64_t other, int64_t own) { in_range(what, other, own, own); };
    equal("max_queries of wide tiles only", config.max_queries, max_queries);
    equal("piece of wide tiles only", config.piece, piece);
    equal("window of wide tiles only", config.window, window);
    equal("group of wide tiles only", config.group, group);
    equal("straddled_rows of wide tiles only", config.straddled_rows, straddled_rows);
    equal("runs of wide tiles only", config.runs, runs);
    equal("workers of wide tiles only", config.workers, workers);
    equal("token_bytes of wide tiles only", config.token_bytes, token_bytes);
    wide_limits = limits, wide_only = std::make_shared<const Config>(std::move(config));
  }

  // Where begins what a request's last token sees, if the request has so many.
  int32_t seen_from(int32_t length) const { return window == 0 ? 0 : std::max(0, length - window); }

  // What a batch is planned with, that has so many tokens when each is read once.
  const Config& of_batch(const std::vector<int32_t>& seq_lens, int64_t tokens) const {
    return wide_only && wide_limits.hold(seq_lens, tokens, runs) ? *wide_only : *this;
  }

  // m for a work item of so many queries.
  int query_tile(int64_t queries) const { return tile_of_rows(queries * group); }

  // The same of so many rows.
  int tile_of_rows(int64_t rows) const {
    const auto tile = std::lower_bound(query_tiles.begin(), query_tiles.end(), rows);
    return tile == query_tiles.end() ? query_tiles.back() : *tile;
  }

  // Whether a pack is run in slices, and so the work items that it is cut into, however short: among wide ones, a few in slices made the kernel 7 to
  // 9 us longer (benchmarks/notes/prices.md, "Prices of an H200, and rows in slices").
  bool in_row_slices(int64_t queries, int64_t tokens) const { return queries == 1 && tokens <= slices_tokens; }

  // Whether single warps run a work item.
  bool by_warps(int64_t queries, bool slices) const { return queries <= warp_queries || slices; }

  // What a work item costs without tails. `Tokens` is int64_t, or a vector of them (optimal.h).
  template <typename Tokens>
  Tokens price_of(const Prices& prices, int64_t queries, Tokens tokens, bool slices) const {
    if (by_warps(queries, slices)) tokens = tokens < warp_tokens ? Tokens{} + warp_tokens : tokens;
    return tokens * prices.growth(queries, slices) + prices.fixed(queries, slices);
  }

  int64_t item_price(const Prices& prices, int64_t queries, int64_t tokens, bool slices, int64_t tail_tokens = 0) const {
    return price_of(prices, queries, tokens, slices) + tail_tokens * prices.tokens[1];
  }

  // What a pack costs that is one work item. `Tokens` is never deduced, as prices do not fit an int32_t.
  template <typename Tokens = int64_t>
  Tokens uncut_price(const Prices& prices, int64_t queries, std::decay_t<Tokens> tokens) const {
    if (queries != 1 || slices_tokens < 0) return price_of(prices, queries, tokens, false);
    return tokens <= slices_tokens ? price_of(prices, queries, tokens, true) : price_of(prices, queries, tokens, false);
  }

  // How many queries a work item may have where it has whole ones only.
  int64_t whole_queries() const { return straddled_rows > 0 ? straddled_rows / group : max_queries; }

  // In how many work items a pack is run.
  int64_t items_of_pack(int64_t queries, int64_t tokens) const {
    if (straddled_rows > 0) return ceil_div(queries * group, straddled_rows);
    const int64_t pieces = queries <= max_queries ? 1 : ceil_div(queries, max_queries);
    const int64_t size = pieces == 1 ? queries : ceil_div(queries, pieces);
    return tokens <= short_tokens[size] ? ceil_div(queries, few_queries) : pieces;
  }

  int64_t pack_price(int64_t queries, int64_t tokens) const {
    if (queries == 0) return 0;
    const int64_t count = items_of_pack(queries, tokens);
    return count * uncut_price(pack_prices, count == 1 ? queries : ceil_div(queries, count), tokens);
  }

  // The most bins that a plan has.
  int64_t max_bins() const { return std::max<int64_t>(1, kMaxWaves * workers / runs); }

  // How many bins there are, at most `limit`. All KV heads run the same bins, so only some numbers keep every worker busy; more bins leave less idle
  // time but cut more packs. If single warps run everything (`narrow`), memory is the bound: then half of the workers use more than half of the bandwidth
  // (`sqrt`), and the further costs of bins were measured (benchmarks/notes/bins.md, "How many bins").
  int64_t num_bins(int64_t limit, double work, double cut, bool narrow) const {
    const int64_t runs = this->runs;
    int64_t best = 0;
    double least = INFINITY;
    const auto look_at = [&](int64_t bins) {
      if (bins <= 0 || bins > limit) return;
      const int64_t waves = ceil_div(bins * runs, workers);
      const double idle = double(waves * workers) / double(bins * runs);
      const double price = narrow ? work * std::sqrt(idle) + double(waves) * double(wave_price) +
                                        double(bins) * (cut + double(bin_end_price))
                                  : work * idle + double(bins) * cut;
      if (price < least) best = bins, least = price;
    };
    look_at(std::max<int64_t>(1, std::min<int64_t>(limit, workers / runs)));
    for (int64_t part = 1; narrow && part < 4; ++part) look_at(part * workers / (4 * runs));
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) look_at(waves * workers / runs);
    return best;
  }

  // The same where each work item has one query and is run by all warps. Memory is the bound there as long as most workers read (`kBusyWorkers`), but
  // items start one after the other on each. A bin that ends within an item makes it start twice, and a part; if items are alike, as many as divide
  // them end within none.
  int64_t num_bins_of_single(int64_t limit, int64_t count, int64_t work, bool alike) const {
    const int64_t runs = this->runs, start = bin_prices.starts[1];
    const double share = double(workers) / double(runs);
    const double needed = std::min(1.0, kBusyWorkers * double(bin_prices.tokens[1]) / double(token_bytes)) * share;
    limit = std::min(limit, max_bins());
    int64_t best = 0;
    double least = INFINITY;
    const auto look_at = [&](int64_t bins) {
      if (bins <= 0 || bins > limit) return;
      const int64_t waves = ceil_div(bins * runs, workers), cuts = alike && count % bins == 0 ? 0 : bins;
      const double full = double(waves - 1) * share;
      const double busy = (full + std::max(double(bins) - full, needed)) / double(bins);
      const double idle = double(waves * workers) / double(bins * runs);
      const double price =
          double(work - count * start) * busy + double((count + cuts) * start) * idle + double(cuts * part_bytes);
      if (price < least) best = bins, least = price;
    };
    look_at(std::max<int64_t>(1, std::min<int64_t>(limit, workers / runs)));
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) look_at(waves * workers / runs);
    look_at(count);
    return best;
  }
};

}  // namespace pat
