// What tools ask of a plan (sglang_pat/packing/native.py, `inspect`); serving does not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "balance.h"
#include "pack.h"
#include "prefixes.h"
#include "prices.h"

namespace pat {

// Prices of a plan's work items, one after the other, each without its tails; returns when the last worker is done, for one KV head. Bins are
// dealt to the workers in turn, all KV heads of a bin side by side.
inline int64_t price_items(const Bins& bins, const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config,
                           std::vector<int64_t>& out) {
  std::vector<int64_t> loads(config.workers);
  int64_t worker = 0;
  for (size_t bin = 0; bin + 1 < bins.begins.size(); ++bin) {
    int64_t load = 0;
    bool narrow = false, wide = false;
    for (int32_t i = bins.begins[bin]; i < bins.begins[bin + 1]; ++i) {
      const Pack& item = bins.items[i];
      const int64_t tokens = (item.end == kOpen ? seq_lens[packs.queries[item.first]] : item.end) - item.start;
      out.push_back(config.item_price(config.bin_prices, item.count, tokens, item.in_row_slices));
      load += out.back() + packs.tail_tokens(item, seq_lens) * config.bin_prices.tokens[1];
      (config.by_warps(item.count, item.in_row_slices) ? narrow : wide) = true;
    }
    if (narrow && wide) load += config.turn_price;
    for (int run = 0; run < config.runs; ++run) loads[worker++ % config.workers] += load;
  }
  return ceil_div(*std::max_element(loads.begin(), loads.end()), config.runs);
}

// The packs that follow from standing choices, with at most `most_tails` tokens of tails: of each its prefix, start, end, whether tails follow,
// the number of its queries, and these.
inline void list_packs(const Prefixes& prefixes, const Choices& choices, int64_t most_tails,
                       const std::vector<int32_t>& seq_lens, const Config& config, std::vector<int64_t>& out) {
  Packs packs;
  packs.begin(prefixes, seq_lens.size(), most_tails);
  for (int32_t index = 0; index < int32_t(prefixes.nodes.size()); ++index) {
    const size_t shared = packs.shared.size(), single = packs.single.size();
    packs.add(prefixes, choices, index, seq_lens, config);
    const auto list = [&](const std::vector<Pack>& all, size_t from) {
      for (; from < all.size(); ++from) {
        const Pack& pack = all[from];
        out.insert(out.end(), {index, pack.start, pack.end, pack.tails, pack.count});
        out.insert(out.end(), &packs.queries[pack.first], &packs.queries[pack.first] + pack.count);
      }
    };
    list(packs.shared, shared);
    list(packs.single, single);
  }
}

}  // namespace pat
