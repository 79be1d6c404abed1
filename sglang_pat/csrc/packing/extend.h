// Plans of extends: every request has new tokens, each of which sees what is cached and the new ones up to itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mirror.h"
#include "pack.h"
#include "write_plan.h"
#include "prefixes.h"

namespace pat {

// A plan's queries are tokens here: request after request, each request's in order. Those of a request are read together; so are those of
// several requests over what these share, as long as one request's alone do not fill a tile: from there on nothing is saved, and only
// parts are added.
//
// A work item that is open at the end has tokens of one request, the last one first: it ends where that one does, and each of the others
// sees what is in front of its own end. What is in front of a token's window is not seen either.
class ExtendMaker {
 public:
  // Queries of shared packs, counted after each prefix. A token has one for each level that its request shares, and only requests with
  // fewer tokens than a tile share: hundreds of such requests, with ten levels, have a hundred thousand. A hostile tree has any number.
  static constexpr int64_t kMaxQueries = 1 << 24;

  // Request `batch[i]` (kNone: not known) has `cached[i]` tokens, and `added[i]` new ones behind them. Returns the plan's ints.
  int64_t plan(Mirror& mirror, const std::vector<int32_t>& batch, const std::vector<int32_t>& cached,
               const std::vector<int32_t>& added, const Config& config) {
    cached_ = cached, added_ = added;
    first_token_.resize(batch.size());
    lengths_.clear();
    sharing_ = batch;
    for (size_t i = 0; i < batch.size(); ++i) {
      first_token_[i] = int32_t(lengths_.size());
      for (int32_t j = 1; j <= added[i]; ++j) lengths_.push_back(cached[i] + j);
      if (added[i] == 0 || added[i] >= config.whole_queries() || config.policy == Policy::kQuery) sharing_[i] = kNone;
    }
    prefixes_.take(mirror, sharing_, cached_, config.piece);
    packs_.begin(prefixes_, lengths_.size());
    packs_.num_parts.assign(lengths_.size(), 0);
    begins_.assign(batch.size(), 0);
    shared_ = 0;
    starts_.assign(prefixes_.nodes.size(), 0);
    for (int32_t index = 0; index < int32_t(prefixes_.nodes.size()); ++index) {
      add_prefix(index, config);
      if (int64_t(packs_.queries.size()) > kMaxQueries) throw TooLarge("an extend's work items have too many queries");
    }
    for (size_t i = 0; i < batch.size(); ++i) add_own(int32_t(i), config);
    if (config.piece > 0) packs_.cut_at_pieces(lengths_, config, 2 * kMaxQueries);
    price_ = packs_.price(config);
    alone_ = 0;
    for (size_t i = 0; i < batch.size(); ++i)
      if (added[i] > 0) alone_ += (cached[i] + added[i] - config.seen_from(cached[i] + 1)) * config.token_bytes;
    return write(config);
  }

  const std::vector<int32_t>& data() const { return data_; }
  int64_t shared() const { return shared_; }  // prefixes that several requests read together
  // What the plan costs; and the least that an attention costs which reads each request's KV for it alone: its traffic.
  int64_t price() const { return price_; }
  int64_t alone() const { return alone_; }
  size_t bytes() const { return data_.capacity() * sizeof(int32_t); }

 private:
  // The segment of a prefix is read by those who do not take it along to what they read next (`choose_pat`, with tokens for queries).
  void add_prefix(int32_t index, const Config& config) {
    const Prefix& prefix = prefixes_.nodes[index];
    const int32_t start = starts_[index];
    const auto joins = [&](int64_t tokens) {
      return (prefix.end - start) * config.token_bytes <= 2 * config.part_bytes * tokens;
    };
    const auto tokens_of = [&](int32_t from, int32_t to) {
      int64_t tokens = 0;
      for (int32_t i = from; i < to; ++i) tokens += added_[prefixes_.order[i]];
      return tokens;
    };
    int32_t groups = 0;
    members_.clear();
    const auto take = [&](int32_t from, int32_t to) {
      if (joins(tokens_of(from, to))) return false;
      groups += 1;
      members_.insert(members_.end(), &prefixes_.order[from], &prefixes_.order[from] + (to - from));
      return true;
    };
    stays_.clear();
    for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) stays_.push_back(take(i, i + 1));
    for (int32_t child = index + 1; child < prefix.last; child = prefixes_.nodes[child].last)
      stays_.push_back(take(prefixes_.nodes[child].first, prefixes_.nodes[child].queries_end));
    // Nobody else reads the segment: a pack of its own would only add parts.
    if (groups < 2) stays_.assign(stays_.size(), false), members_.clear();
    auto stays = stays_.begin();
    for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) begins_[prefixes_.order[i]] = *stays++ ? prefix.end : start;
    for (int32_t child = index + 1; child < prefix.last; child = prefixes_.nodes[child].last)
      starts_[child] = *stays++ ? prefix.end : start;

    const size_t first = packs_.queries.size();
    for (const int32_t member : members_)
      for (int32_t j = 0; j < added_[member]; ++j)
        if (config.seen_from(cached_[member] + 1 + j) < prefix.end) packs_.queries.push_back(first_token_[member] + j);
    shared_ += packs_.queries.size() > first;
    add_packs(start, prefix.end, int32_t(first), config);
  }

  // What a request reads alone, by as many of its tokens as fit a tile.
  void add_own(int32_t request, const Config& config) {
    const int32_t count = added_[request], pieces = int32_t(ceil_div(count, config.whole_queries()));
    for (int32_t i = 0; i < pieces; ++i) {
      const int32_t from = int32_t(int64_t(count) * i / pieces), to = int32_t(int64_t(count) * (i + 1) / pieces);
      const size_t first = packs_.queries.size();
      for (int32_t j = to; j-- > from;) packs_.queries.push_back(first_token_[request] + j);
      add_pack(std::max(begins_[request], config.seen_from(cached_[request] + 1 + from)), kOpen, int32_t(first), to - from,
               config);
    }
  }

  void add_packs(int32_t start, int32_t end, int32_t first, const Config& config) {
    const int32_t count = int32_t(packs_.queries.size()) - first, pieces = int32_t(ceil_div(count, config.whole_queries()));
    for (int32_t i = 0, from = 0; i < pieces; ++i) {
      const int32_t to = int32_t(int64_t(count) * (i + 1) / pieces);
      // What none of these tokens sees any more may be somebody else's by now.
      int32_t seen = end;
      for (int32_t j = first + from; j < first + to; ++j)
        seen = std::min(seen, config.seen_from(lengths_[packs_.queries[j]]));
      add_pack(std::max(start, seen), end, first + from, to - from, config);
      from = to;
    }
  }

  void add_pack(int32_t start, int32_t end, int32_t first, int32_t count, const Config& config) {
    (count > 1 ? packs_.shared : packs_.single).emplace_back(start, end, first, count);
    for (int32_t i = first; i < first + count; ++i) packs_.num_parts[packs_.queries[i]] += 1;
    const int64_t tokens = (end == kOpen ? lengths_[packs_.queries[first]] : end) - start;
    packs_.add_price(count, tokens, config);
  }

  int64_t write(const Config& config) {
    Config whole = config;
    whole.window = 0;             // positions, as nothing moves
    whole.rebalance_queries = 0;  // packs begin where their first token sees, and were priced as they are
    whole.straddled_rows = 0;
    const int64_t bins = config.max_bins();
    const int64_t items = int64_t(packs_.shared.size() + packs_.single.size()) + bins;
    const int64_t queries = int64_t(packs_.queries.size()) + bins * config.max_queries;
    data_.resize(kHeaderSize + items * kItemSize + 2 * queries + int64_t(lengths_.size()) + bins + 2);
    writer_.write(packs_, lengths_, lengths_, whole, data_.data(), int64_t(data_.size()), INT32_MAX, statistics_);
    data_.resize(data_[kSize]);
    return int64_t(data_.size());
  }

  int64_t shared_ = 0, price_ = 0, alone_ = 0;
  std::vector<int32_t> cached_, added_, sharing_;  // of each request
  std::vector<int32_t> first_token_, begins_;      // likewise: its first query, and from where on it reads alone
  std::vector<int32_t> lengths_;                   // of each query: what it sees, without windows
  std::vector<int32_t> starts_;                    // of each prefix: where its segment begins
  std::vector<int32_t> members_;
  std::vector<char> stays_;
  Prefixes prefixes_;
  Packs packs_;
  PlanWriter writer_;
  Statistics statistics_;
  std::vector<int32_t> data_;
};

}  // namespace pat
