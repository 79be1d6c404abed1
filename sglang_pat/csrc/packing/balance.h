// Lays packs out in bins (sglang_pat/packing/balance.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pack.h"
#include "prices.h"

namespace pat {

// What is counted per step that a plan runs.
struct Statistics {
  int64_t items = 0, parts = 0, kv_tokens = 0, growing_tails = 0, seq_tokens = 0, longest_bin = 0;
  std::vector<int64_t> query_sizes;  // work items with so many queries
};

// A plan's work items, bin after bin.
class Bins {
 public:
  std::vector<Pack> items;
  std::vector<uint8_t> in_row_slices;  // of each item, whether it is run in slices
  std::vector<int32_t> begins;         // of each bin in `items`, with the end of the last
  std::vector<int32_t> num_parts;      // of each query
  int64_t even_steps = 0;              // for which the bins stay even

  void reserve(size_t batch) {
    items.reserve(3 * batch);
    in_row_slices.reserve(3 * batch);
    begins.reserve(1024);
    num_parts.reserve(batch);
  }

  // Several times (balance.py, PASSES), and once more if the last was not the best.
  template <typename Grows>
  void fill(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, Statistics& statistics,
            Grows grows) {
    const int64_t bins = count(packs, seq_lens, config);
    const int64_t passes = packs.shared.size() + packs.single.size() <= kPassesPacks ? kPasses : 1;
    int64_t expected = kUnknown, best = kUnknown, least = INT64_MAX;
    const auto fill_with = [&](int64_t expected) {
      return fill_once(packs, seq_lens, config, statistics, grows, bins, expected);
    };
    for (int64_t number = 0;; ++number) {
      const auto [added, work] = fill_with(expected);
      if (statistics.longest_bin < least) least = statistics.longest_bin, best = expected;
      const bool even = __int128(statistics.longest_bin) * bins <= work + work / kSlack;
      if (added == 0 || added == expected || even || number + 1 == passes) break;
      expected = number % 2 == 0 ? added : (added + expected) / 2;
    }
    if (expected != best) fill_with(best);
  }

 private:
  static constexpr int64_t kUnknown = -1;

  struct Filled {
    int64_t added, work;  // what cuts and turns added to the price of the packs, and all together
  };

  // `expected` is what cuts and turns will add, if that is known.
  template <typename Grows>
  Filled fill_once(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, Statistics& statistics,
                   Grows grows, int64_t left, int64_t expected) {
    items.clear();
    in_row_slices.clear();
    begins.assign(1, 0);
    statistics.longest_bin = 0;
    num_parts = packs.num_parts;
    int64_t remaining = packs.work;
    Queue shared{packs.shared, 0, 0}, single{packs.single, 0, 0};
    const auto end_of = [&](const Pack& pack) {
      return int64_t(pack.end == kOpen ? seq_lens[packs.queries[pack.first]] : pack.end);
    };
    // With eight packs for a bin, nearly every bin can be filled without a cut.
    int64_t cuts = int64_t(packs.shared.size() + packs.single.size()) < 8 * left, added = 0;
    int64_t work = 0, growth = 0, most_growth = 0, turns = 0;
    for (; left > 0; --left) {
      // The cuts to come will make work items of their own; as many for each bin as there were so far. So will bins with two
      // kinds of them cost what it takes to go from one to the other.
      int64_t ahead = std::max<int64_t>(0, expected - added);
      if (expected == kUnknown) {
        ahead = config.bin_prices.starts[1] * (left - 1) * cuts / int64_t(begins.size());
        if (!shared.empty()) ahead += config.turn_price * (left - 1) * turns / int64_t(begins.size());
      }
      const int64_t target = ceil_div(remaining + ahead, left), slack = target / kSlack;
      int64_t load = 0, bin_growth = 0;
      int kinds = 0;
      const auto turn_to = [&](int kind) { return kinds == (3 ^ kind) ? config.turn_price : 0; };
      while ((!shared.empty() || !single.empty()) && (load < target || left == 1)) {
        const int64_t gap = target - load;
        // The last bin takes all, a nearly full one what helps.
        const auto fits = [&](int64_t price) {
          return left == 1 || (price <= gap + slack && (gap > slack || price <= 2 * gap));
        };
        Queue* queue = nullptr;
        int64_t tokens = 0, turn = 0, growth_price = 0, price = 0;
        int kind = 0;
        bool slices = false;
        const auto look_at = [&](Queue& at) {
          queue = &at;
          const Pack& pack = at.packs[at.index];
          const int64_t end = end_of(pack);
          tokens = end - at.start(), slices = config.in_row_slices(pack.count, end - pack.start);
          kind = config.by_warps(pack.count, slices) ? 1 : 2, turn = turn_to(kind);
          growth_price = config.bin_prices.growth(pack.count, slices);
          price = config.item_price(config.bin_prices, pack.count, tokens, slices) + turn;
          if (pack.tails) price += packs.tail_tokens(pack, seq_lens) * config.bin_prices.tokens[1];
        };
        look_at(shared.empty() ? single : shared);
        if (queue == &shared && !single.empty() && load > 0 && !fits(price)) look_at(single);
        const Pack& pack = queue->packs[queue->index];
        const int32_t start = queue->start();
        const auto add_until = [&](int32_t end, bool tails) {
          items.emplace_back(start, end, pack.first, pack.count, tails);
          in_row_slices.push_back(slices);
        };
        const auto take_whole = [&] {
          add_until(pack.end, pack.tails);
          if (pack.tails) bin_growth += pack.count * config.bin_prices.tokens[1];
          if (pack.end == kOpen && grows(packs.queries[pack.first])) bin_growth += growth_price;
          queue->index += 1;
          queue->begin = 0;
          load += price;
        };
        if (fits(price)) {
          kinds |= kind;
          remaining += turn, added += turn;
          take_whole();
          continue;
        }
        // To the nearest grain; not where that is nothing or everything, nor into a gap that is smaller than the start
        // of one more work item. An empty bin reads for as long as it takes to start.
        const int64_t begin = config.bin_prices.fixed(pack.count, slices) + turn;
        const int64_t room = load == 0 ? std::max(gap - begin, begin) : std::max<int64_t>(0, gap - begin);
        const int64_t grains = (room + growth_price * config.grain / 2) / (growth_price * config.grain);
        const int64_t cut = load == 0 || gap > std::max(slack, begin) ? grains * config.grain : 0;
        if (cut > 0 && cut < tokens) {
          cuts += 1;
          queue->begin = start + int32_t(cut);
          add_until(queue->begin, false);
          for (int32_t i = 0; i < pack.count; ++i) num_parts[packs.queries[pack.first + i]] += 1;
          remaining += begin, added += begin;
          load += config.item_price(config.bin_prices, pack.count, cut, slices) + turn;
          kinds |= kind;
        } else if (load == 0) {
          take_whole();
        }
        break;
      }
      turns += kinds == 3;
      remaining -= load;
      statistics.longest_bin = std::max(statistics.longest_bin, load);
      begins.push_back(int32_t(items.size()));
      work += load;
      growth += bin_growth;
      most_growth = std::max(most_growth, bin_growth);
    }
    const int64_t bins = int64_t(begins.size()) - 1, excess = most_growth * bins - growth;
    const int64_t allowed = std::max(work / kUneven, bins * config.kv_tiles.back() * config.bin_prices.tokens[1]);
    even_steps = excess > 0 ? std::max(kLeastSteps, allowed / excess) : INT32_MAX;
    return {added, work};
  }

  // How many bins there are. A cut affects so many queries: the mean over packs, weighted by work, where packs shorter than a bin count as one
  // query, as they go into a bin whole, and the cut falls on a pack of one query beside them.
  static int64_t count(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config) {
    const int64_t least = config.kv_tiles.back() * config.token_bytes + config.bin_prices.starts[1];
    const int64_t limit = std::max<int64_t>(1, packs.work / least);
    if (config.wave_price > 0 && packs.shared.empty() && !config.by_warps(1, false)) {
      int64_t cheapest = INT64_MAX, dearest = 0;
      bool by_all = true;
      for (const Pack& pack : packs.single) {
        const int64_t end = pack.end == kOpen ? seq_lens[packs.queries[pack.first]] : pack.end, tokens = end - pack.start;
        const int64_t price = config.uncut_price(config.bin_prices, 1, tokens);
        cheapest = std::min(cheapest, price), dearest = std::max(dearest, price);
        by_all = by_all && !config.in_row_slices(1, tokens);
      }
      const bool alike = dearest - cheapest <= dearest / kSlack;
      if (by_all) return config.num_bins_of_single(limit, int64_t(packs.single.size()), packs.work, alike);
    }
    const auto share = int64_t(__int128(packs.work) * config.runs / (2 * config.workers));
    double weighted_work = double(packs.work);
    bool narrow = config.warp_queries > 0;
    for (const Pack& pack : packs.shared) {
      const int64_t tails = packs.tail_tokens(pack, seq_lens);
      const int64_t price = config.item_price(config.bin_prices, pack.count, pack.end - pack.start, false, tails);
      if (price > share) weighted_work += double(price) * (pack.count - 1);
      narrow = narrow && pack.count <= config.warp_queries;
    }
    const double queries = weighted_work / double(std::max<int64_t>(1, packs.work));
    return config.num_bins(limit, double(packs.work), queries * double(config.part_bytes), narrow);
  }

  // Packs that wait for a bin; of the first one, the KV before `begin` is already laid out.
  struct Queue {
    const std::vector<Pack>& packs;
    size_t index;
    int32_t begin;

    bool empty() const { return index == packs.size(); }
    int32_t start() const { return std::max(begin, packs[index].start); }
  };
};

}  // namespace pat
