// Which queries read which KV positions together: choices for every prefix, and the packs that follow from them.
// tests/oracle/heuristic.py does the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "prices.h"
#include "layout.h"
#include "prefixes.h"

namespace pat {

// Does not fit the buffers; PlanMaker packs less then.
struct TooLarge : std::length_error {
  using std::length_error::length_error;
};

// KV positions [start, end) of `count` queries, `queries[first]` and following; `end` is kOpen for a tail. With `tails`, each query then reads its
// own tail in the same work item. Of the first query it may have only the rows from `first_row` on; with `Config::straddled_rows`, of the last one
// only those up to so many in all.
struct Pack {
  int32_t start, end;
  int32_t first;
  int16_t count;  // no more than a tile has rows
  bool tails : 1;
  bool in_row_slices : 1;  // of a work item in a bin: whether it is run in slices
  uint8_t first_row;

  Pack() = default;
  Pack(int32_t start, int32_t end, int32_t first, int32_t count, bool tails = false, int64_t first_row = 0)
      : start(start),
        end(end),
        first(first),
        count(int16_t(count)),
        tails(tails),
        in_row_slices(false),
        first_row(uint8_t(first_row)) {}

  // Whether it has all rows of its queries.
  bool whole() const { return count == 1 && first_row == 0; }
};

// With 20, planning 1,024 requests took 5 % longer.
static_assert(sizeof(Pack) == 16);

// How many leaves read a segment together, and then their tails, in a work item each of which has as many as may be; 0 if each is alone. A work
// item is not cut within its tails, of which it may have `most` tokens.
inline int64_t leaves_together(const Prefixes& prefixes, const Prefix& prefix, const int32_t* seq_lens,
                               const Config& config, int64_t most) {
  const int64_t count = prefix.leaves();
  if (most == 0 || count < 2) return 0;
  const int64_t size = ceil_div(count, ceil_div(count, config.tails_queries));
  return size * prefixes.mean_tail(prefix, seq_lens) <= most ? size : 0;
}

// What becomes of each prefix's segment, the KV that it inherited and its own.
struct Choices {
  std::vector<uint8_t> joins;       // per prefix: whether it takes its parent's segment along
  std::vector<uint8_t> leaf_joins;  // per position of `order`: the same for leaves

  void reset(const Prefixes& prefixes) {
    joins.assign(prefixes.nodes.size(), true);
    leaf_joins.assign(prefixes.order.size(), true);
  }

  void leaves(const Prefix& prefix, bool join) {
    if (!join) std::memset(&leaf_joins[prefix.first], false, prefix.leaves());
  }
};

struct Packs {
  std::vector<Pack> shared, single;  // packs of several queries, and of one
  std::vector<int32_t> queries;
  std::vector<int32_t> num_parts;  // of each query, once counted
  // Prices by the model, before anything is cut: of the policy's packs when it is decided what is packed, and as split by the query limit when they
  // are laid out in bins.
  int64_t reads = 0, work = 0;
  // What wide work items of several queries cost beyond reading each pack's KV once; `add_computing`.
  int64_t computing = 0;
  int64_t most_tails = 0;  // tokens of tails that a work item may have behind what its queries share

  void reserve(size_t batch) {
    shared.reserve(batch);
    single.reserve(2 * batch);
    queries.reserve(8 * batch);
    starts_.reserve(batch + 1);
    leaves_.reserve(batch);
    num_parts.reserve(batch);
  }

  void begin(const Prefixes& prefixes, size_t batch, int64_t tails = 0) {
    most_tails = tails;
    shared.clear();
    single.clear();
    queries.clear();
    reads = work = computing = 0;
    starts_.assign(prefixes.nodes.size(), 0);
    staying_.assign(batch + 1, 0);
  }

  int32_t start(int32_t prefix) const { return starts_[prefix]; }

  // The packs of prefix `index`, whose choices stand; to be called in preorder.
  void add(const Prefixes& prefixes, const Choices& choices, int32_t index, const std::vector<int32_t>& seq_lens,
           const Config& config) {
    const Prefix& prefix = prefixes.nodes[index];
    const int32_t start = starts_[index], first = int32_t(queries.size());
    const int32_t* order = prefixes.order.data();
    if (prefix.leaves() > 0) {
      // Written for all, kept for those that stay: no branch to guess wrong.
      queries.resize(first + prefix.leaves());
      int32_t* end = queries.data() + first;
      for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) {
        const bool stays = !choices.leaf_joins[i];
        *end = order[i];
        end += stays;
        staying_[i] += stays;
        staying_[i + 1] -= stays;
      }
      queries.resize(end - queries.data());
    }
    for (int32_t child = index + 1; child < prefix.last; child = prefixes.nodes[child].last) {
      const Prefix& c = prefixes.nodes[child];
      starts_[child] = choices.joins[child] ? start : prefix.end;
      if (choices.joins[child]) continue;
      queries.insert(queries.end(), order + c.first, order + c.queries_end);
      staying_[c.first] += 1;
      staying_[c.queries_end] -= 1;
    }
    if (const int32_t count = int32_t(queries.size()) - first) split_by_tile(start, prefix.end, first, count, config);
    if (prefix.leaves() == 0) return;
    if (most_tails > 0 && start < prefix.end && add_with_tails(prefixes, choices, prefix, start, seq_lens, config)) return;
    const int32_t tails = int32_t(queries.size());
    queries.insert(queries.end(), order + prefix.first, order + prefix.leaves_end);
    single.resize(single.size() + prefix.leaves());
    Pack* tail = single.data() + single.size() - prefix.leaves();
    for (int32_t i = 0; i < prefix.leaves(); ++i) {
      const int32_t from = choices.leaf_joins[prefix.first + i] ? start : prefix.end;
      tail[i] = Pack(from, kOpen, tails + i, 1);
      add_price(1, seq_lens[queries[tails + i]] - from, config);
    }
  }

  // The prices of one that is a work item.
  void add_price(int64_t queries, int64_t tokens, const Config& config) {
    reads += config.uncut_price(config.pack_prices, queries, tokens);
    work += config.uncut_price(config.bin_prices, queries, tokens);
  }

  // Tokens of the tails that follow.
  int64_t tail_tokens(const Pack& pack, const std::vector<int32_t>& seq_lens) const {
    int64_t tokens = 0;
    for (int32_t i = 0; pack.tails && i < pack.count; ++i) tokens += seq_lens[queries[pack.first + i]] - pack.end;
    return tokens;
  }

  // Every query has a part in each pack that it stayed in, and its tail.
  void count_parts(const Prefixes& prefixes) {
    num_parts.resize(prefixes.order.size());
    int32_t parts = 1;
    for (size_t i = 0; i < prefixes.order.size(); ++i) {
      parts += staying_[i];
      num_parts[prefixes.order[i]] = parts;
    }
  }

  // Cuts packs, and what a window leaves of them, where positions are multiples of `config.piece`. A query is in those pieces
  // of its packs of which it sees something. Throws TooLarge if the pieces have more than `most` queries together.
  void cut_at_pieces(const std::vector<int32_t>& seq_lens, const Config& config, int64_t most) {
    num_parts.assign(seq_lens.size(), 0);
    work = 0;
    uncut_.assign(shared.begin(), shared.end());
    uncut_.insert(uncut_.end(), single.begin(), single.end());
    shared.clear();
    single.clear();
    for (const Pack& pack : uncut_) {
      const int32_t last = pack.end == kOpen ? seq_lens[queries[pack.first]] : pack.end;
      int32_t start = last;
      for (int32_t i = 0; i < pack.count; ++i) start = std::min(start, config.seen_from(seq_lens[queries[pack.first + i]]));
      start = std::max(start, pack.start);
      for (int64_t end = 0; start < last; start = int32_t(end)) {
        end = std::min<int64_t>(last, int64_t(start) - start % config.piece + config.piece);
        const int32_t first = int32_t(queries.size());
        for (int32_t i = 0; i < pack.count; ++i) {
          const int32_t query = queries[pack.first + i], length = seq_lens[query];
          if (length <= start || config.seen_from(length) >= end) continue;
          queries.push_back(query);
          num_parts[query] += 1;
        }
        const int32_t count = int32_t(queries.size()) - first;
        if (int64_t(queries.size()) > most) throw TooLarge("pieces do not fit a plan's buffer");
        if (count == 0) continue;
        (count > 1 ? shared : single).emplace_back(start, end == last ? pack.end : int32_t(end), first, count);
        work += config.uncut_price(config.bin_prices, count, end - start);
      }
    }
  }

  // By the model, with the parts that queries of more than one pass through memory.
  int64_t price(const Config& config) const {
    int64_t parts = 0;
    for (const int32_t count : num_parts) parts += count > 1 ? count : 0;
    return reads + parts * config.part_bytes;
  }

 private:
  // The packs of leaves that read a segment with their tails: tails of as many tiles side by side, and no more of them than `most_tails`. False if
  // they are not put together.
  bool add_with_tails(const Prefixes& prefixes, const Choices& choices, const Prefix& prefix, int32_t start,
                      const std::vector<int32_t>& seq_lens, const Config& config) {
    if (leaves_together(prefixes, prefix, seq_lens.data(), config, most_tails) == 0) return false;
    const auto joins = choices.leaf_joins.begin();
    if (!std::all_of(joins + prefix.first, joins + prefix.leaves_end, [](uint8_t joined) { return joined != 0; }))
      return false;
    const int32_t* order = prefixes.order.data();
    leaves_.clear();
    for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) leaves_.push_back(i);
    const auto tail = [&](int32_t leaf) { return seq_lens[order[leaf]] - prefix.end; };
    // Not std::stable_sort, which allocates memory.
    const auto before = [&](int32_t a, int32_t b) {
      const int64_t n = config.kv_tile, more = ceil_div(tail(a), n) - ceil_div(tail(b), n);
      return more < 0 || (more == 0 && a < b);
    };
    if (!std::is_sorted(leaves_.begin(), leaves_.end(), before)) std::sort(leaves_.begin(), leaves_.end(), before);
    const int64_t count = prefix.leaves(), pieces = ceil_div(count, config.tails_queries);
    for (int64_t i = 0; i < pieces; ++i) {
      const int32_t* piece = &leaves_[count * i / pieces];
      const int32_t size = int32_t(count * (i + 1) / pieces - count * i / pieces), first = int32_t(queries.size());
      for (int32_t j = 0; j < size; ++j) queries.push_back(order[piece[j]]);
      const Pack pack{start, prefix.end, first, size, true};
      const int64_t tokens = prefix.end - start, tails = tail_tokens(pack, seq_lens);
      if (size > 1 && tails <= most_tails) {
        shared.push_back(pack);
        const int64_t price = config.item_price(config.pack_prices, size, tokens, false, tails);
        reads += price;
        work += config.item_price(config.bin_prices, size, tokens, false, tails);
        if (!config.by_warps(size, false)) add_computing(price, tokens + tails, config);
        continue;
      }
      const bool parts = size > 1 && parts_pay(pack, seq_lens, config);
      if (parts) split_by_tile(start, prefix.end, first, size, config);
      for (int32_t j = 0; j < size; ++j) {
        const int32_t from = parts ? prefix.end : start;
        single.emplace_back(from, kOpen, first + j, 1);
        add_price(1, tail(piece[j]) + prefix.end - from, config);
        staying_[piece[j]] += parts;
        staying_[piece[j] + 1] -= parts;
      }
    }
    return true;
  }

  // Whether queries whose tails are too long for one work item read the segment together even so, and their tails as parts.
  bool parts_pay(const Pack& pack, const std::vector<int32_t>& seq_lens, const Config& config) const {
    const int64_t tokens = pack.end - pack.start;
    int64_t together = config.pack_price(pack.count, tokens) + pack.count * config.part_bytes * (pack.start > 0 ? 1 : 2);
    int64_t alone = 0;
    for (int32_t i = 0; i < pack.count; ++i) {
      const int64_t tail = seq_lens[queries[pack.first + i]] - pack.end;
      alone += config.uncut_price(config.pack_prices, 1, tokens + tail);
      together += config.uncut_price(config.pack_prices, 1, tail);
    }
    return together < alone;
  }

  // Packs that are a work item each until they are cut, as even as can be.
  void split_by_tile(int32_t start, int32_t end, int32_t first, int32_t count, const Config& config) {
    if (config.straddled_rows > 0 && count > 1) return split_rows(start, end, first, count, config);
    const int32_t pieces = int32_t(config.items_of_pack(count, end - start));
    const bool computes = count > 1 && config.narrow_first_price > 0;
    int64_t wide = 0;
    for (int32_t i = 0, from = 0; i < pieces; ++i) {
      const int32_t to = pieces == 1 ? count : int32_t(int64_t(count) * (i + 1) / pieces);
      (to - from > 1 ? shared : single).emplace_back(start, end, first + from, to - from);
      work += config.uncut_price(config.bin_prices, to - from, end - start);
      reads += config.pack_price(to - from, end - start);
      if (computes && !config.by_warps(to - from, config.in_row_slices(to - from, end - start)))
        wide += config.item_price(config.pack_prices, to - from, end - start, false);
      from = to;
    }
    if (computes) add_computing(wide, end - start, config);
  }

  // The same of as many rows as a tile has, and one of those that are left.
  void split_rows(int32_t start, int32_t end, int32_t first, int32_t count, const Config& config) {
    const int64_t rows = int64_t(count) * config.group, tokens = end - start;
    int64_t price = 0;
    for (int64_t row = 0; row < rows; row += config.straddled_rows) {
      const int64_t query = row / config.group,
                    queries = ceil_div(std::min(rows, row + config.straddled_rows), config.group) - query;
      (queries > 1 ? shared : single)
          .emplace_back(start, end, int32_t(first + query), int32_t(queries), false, row - query * config.group);
      work += config.item_price(config.bin_prices, queries, tokens, false);
      price += config.item_price(config.pack_prices, queries, tokens, false);
    }
    reads += price;
    if (config.narrow_first_price > 0) add_computing(price, tokens, config);
  }

  void add_computing(int64_t price, int64_t tokens, const Config& config) {
    computing += std::max<int64_t>(0, price - tokens * config.token_bytes);
  }

  std::vector<Pack> uncut_;
  std::vector<int32_t> starts_, leaves_;
  std::vector<int32_t> staying_;  // per position of `order`: packs that begin to hold it there, less those that end
};

// The paper's PAT-naive: every prefix a pack, but those that are empty.
inline void choose_naive(const Prefixes& prefixes, Choices& choices) {
  for (size_t i = 1; i < prefixes.nodes.size(); ++i) {
    const Prefix &prefix = prefixes.nodes[i], &parent = prefixes.nodes[prefix.parent];
    choices.joins[i] = parent.start == parent.end;
    choices.leaves(prefix, prefix.start == prefix.end);
  }
}

// TreeHeuristic, the paper's Algorithm 1, for one prefix whose segment begins at `start`. With one query head for each KV head and KV of 16 bits it
// merges s queries into l tokens if 4 s >= l, as the paper does (§5.1), but for the bytes of the LSE.
inline void choose_pat(const Prefixes& prefixes, Choices& choices, int32_t index, int32_t start, const Config& config) {
  const Prefix& prefix = prefixes.nodes[index];
  const auto joins = [&](int64_t queries) {
    return (prefix.end - start) * config.token_bytes <= 2 * config.part_bytes * queries;
  };
  const bool leaf_joins = joins(1);
  int64_t staying = leaf_joins ? 0 : prefix.leaves();
  for (int32_t child = index + 1; child < prefix.last; child = prefixes.nodes[child].last) {
    choices.joins[child] = joins(prefixes.nodes[child].queries());
    staying += !choices.joins[child];
  }
  if (staying != 1) return choices.leaves(prefix, leaf_joins);
  // Nobody else reads the segment: a pack of its own would only add parts.
  for (int32_t child = index + 1; child < prefix.last; child = prefixes.nodes[child].last) choices.joins[child] = true;
}

}  // namespace pat
