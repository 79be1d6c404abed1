// From a batch to its plan, and where that does not fit, to one of fewer levels (`kLevels`). tests/oracle does the same in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "inspect.h"
#include "prices.h"
#include "mirror.h"
#include "optimal.h"
#include "pack.h"
#include "write_plan.h"
#include "prefixes.h"

namespace pat {

struct Buffer {
  int32_t* data;
  int64_t capacity;  // in ints
};

// Keeps its scratch memory from plan to plan. `copy` alone needs the mirror.
class PlanMaker {
 public:
  void reserve(size_t batch) {
    prefixes_.reserve(batch);
    packs_.reserve(batch);
    unpacked_.reserve(batch);
    writer_.reserve(batch);
    seq_lens_.reserve(batch);
    seen_.reserve(batch);
    sharing_.reserve(batch);
  }

  // What was planned last is not for `inspect`.
  void forget() { best_ = nullptr; }

  // The first `told` requests have become `steps` tokens longer. Whoever has more tokens than the window shares nothing, and is planned as
  // if the window were all there is (sglang_pat/packing/tree.py, `in_windows`); with pieces, which begin at positions, as long as it is.
  void copy(Mirror& mirror, const std::vector<int32_t>& batch, const std::vector<int32_t>& seq_lens, size_t told,
            int64_t steps, int32_t window, int32_t piece) {
    best_ = nullptr;
    seq_lens_ = seq_lens;
    for (size_t i = 0; i < told; ++i) seq_lens_[i] = int32_t(std::min(kMaxPosition, seq_lens_[i] + steps));
    seen_ = seq_lens_;
    if (window == 0) return prefixes_.take(mirror, batch, seen_, piece);
    sharing_ = batch;
    for (size_t i = 0; i < seen_.size(); ++i)
      if (seen_[i] > window) seen_[i] = piece > 0 ? seen_[i] : window, sharing_[i] = kNone;
    prefixes_.take(mirror, sharing_, seen_, piece);
  }

  // Where a plan does not fit, fewer levels of the tree are packed; the statistics say how many. Throws TooLarge if it does
  // not even fit with none.
  void plan(const Config& config, Policy policy, Buffer buffer, int64_t max_slots, Statistics& statistics) {
    statistics.levels = kNone;
    while (true) {
      try {
        return plan_all(config, policy, buffer, max_slots, statistics);
      } catch (const TooLarge&) {
        if (prefixes_.max_depth < 0 || config.piece > 0) throw;  // with pieces, all have as many parts whatever is shared
      }
      const auto cuts = [&](int32_t levels) { return levels <= prefixes_.max_depth; };
      statistics.levels = *std::find_if(std::begin(kLevels), std::end(kLevels), cuts);
      prefixes_.keep_levels(statistics.levels, seen_);
    }
  }

  const std::vector<int32_t>& seq_lens() const { return seq_lens_; }

  // Of the plan that was made last, whose config is `any_batch`: whether it was made with `wide_only`, the price of a token of tails in bins and of a
  // turn, when the last worker is done, and the number of its work items; then their prices; then its packs (inspect.h).
  std::vector<int64_t> inspect(const Config& any_batch) const {
    if (best_ == nullptr) throw std::invalid_argument("there is no plan to inspect");
    const Config& config = any_batch.of_batch(seen_, prefixes_.kv_minimum);
    std::vector<int64_t> prices;
    const int64_t makespan = price_items(writer_.bins(), *best_, seen_, config, prices);
    std::vector<int64_t> out = {&config != &any_batch, config.bin_prices.tokens[1], config.turn_price, makespan,
                                int64_t(prices.size())};
    out.insert(out.end(), prices.begin(), prices.end());
    list_packs(prefixes_, choices_, best_->most_tails, seen_, config, out);
    return out;
  }

  size_t bytes() const {
    return prefixes_.nodes.capacity() * sizeof(Prefix) + prefixes_.order.capacity() * sizeof(int32_t) + optimal_.bytes();
  }

 private:
  void plan_all(const Config& any_batch, Policy policy, Buffer buffer, int64_t max_slots, Statistics& statistics) {
    const Config& config = any_batch.of_batch(seen_, prefixes_.kv_minimum);
    choices_.reset(prefixes_);
    // With pieces, every query has its parts anyway: whatever is shared is read together.
    if (config.piece > 0 && policy != Policy::kQuery) policy = Policy::kNaive;
    if (policy == Policy::kNaive) choose_naive(prefixes_, choices_);
    if (policy == Policy::kOptimal && prefixes_.max_depth >= kMaxDepth) policy = Policy::kPat;
    if (policy == Policy::kOptimal) optimal_.solve(prefixes_, seen_, config);
    packs_.begin(prefixes_, seq_lens_.size(), policy == Policy::kOptimal ? Optimal::most_tails(prefixes_, config) : 0);
    for (int32_t index = 0; index < int32_t(prefixes_.nodes.size()); ++index) {
      if (index > 0) {
        if (policy == Policy::kPat) choose_pat(prefixes_, choices_, index, packs_.start(index), config);
        if (policy == Policy::kOptimal) optimal_.choose(prefixes_, choices_, index);
      }
      packs_.add(prefixes_, choices_, index, seen_, config);
      if (int64_t(packs_.queries.size()) > buffer.capacity) throw TooLarge("a plan does not fit its buffer");
    }
    packs_.count_parts(prefixes_);
    // Packing pays by the model or is not done.
    const Packs* best = &packs_;
    if (config.piece > 0) {
      packs_.cut_at_pieces(seen_, config, std::min<int64_t>(2 * buffer.capacity, INT32_MAX));
    } else if (prefixes_.nodes.size() > 1 && packs_.price(config) > unpacked_price(config)) {
      choices_.reset(prefixes_);
      unpacked_.begin(prefixes_, seq_lens_.size());
      for (int32_t index = 0; index < int32_t(prefixes_.nodes.size()); ++index)
        unpacked_.add(prefixes_, choices_, index, seen_, config);
      unpacked_.count_parts(prefixes_);
      best = &unpacked_;
    }
    writer_.write(*best, seen_, seq_lens_, config, buffer.data, buffer.capacity, max_slots, statistics);
    best_ = best;
    statistics.unpacked = Unpacked::kNo;
    if (policy == Policy::kQuery || statistics.levels != kNone || statistics.kv_tokens < statistics.seq_tokens) return;
    // Those that are shorter than a piece have become empty.
    const auto& nodes = prefixes_.nodes;
    const bool shares = std::any_of(nodes.begin() + 1, nodes.end(), [](const Prefix& one) { return one.end > one.start; });
    statistics.unpacked = shares ? Unpacked::kUnpaid : Unpacked::kUnshared;
  }

  int64_t unpacked_price(const Config& config) const {
    int64_t price = 0;
    for (const int32_t length : seen_) price += config.uncut_price(config.pack_prices, 1, length);
    return price;
  }

  std::vector<int32_t> seq_lens_, seen_, sharing_;  // tokens of each request, those that it sees, and who may share
  Prefixes prefixes_;
  Choices choices_;
  Optimal optimal_;
  Packs packs_, unpacked_;
  const Packs* best_ = nullptr;  // what was written last; null if nothing was since `copy`
  PlanWriter writer_;
};

}  // namespace pat
