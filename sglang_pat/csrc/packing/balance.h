// Lays packs out in bins of equal price; tests/oracle/balance.py does the same.
//
// The paper cuts packs that are longer than the mean into equal pieces (PAT §6). But then SMs finish at different times, and short batches get needless
// parts. Here bins are filled in order, each up to the average of the remaining work, and a pack is cut only where a bin would overflow (McNaughton's
// wrap-around rule); where that leaves one too long, they are filled again up to the least capacity that is enough, and then with all packs split into
// work items of fewer queries. Packs of one query go last into each bin, so the cut falls on them if there are any: it then makes one part, not one per
// query.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pack.h"
#include "prices.h"

namespace pat {

// Why a plan packs nothing: no queries share KV that they see; some do, and packing them would cost more.
enum class Unpacked { kNo, kUnshared, kUnpaid };

// What is counted per step that a plan runs.
struct Statistics {
  Unpacked unpacked = Unpacked::kNo;  // where all was tried
  int64_t items = 0, parts = 0, kv_tokens = 0, growing_tails = 0, seq_tokens = 0, longest_bin = 0;
  std::vector<int64_t> query_sizes;    // work items with so many queries
  std::vector<int64_t> kv_by_queries;  // KV tokens that work items read for so many queries at once
  int32_t levels = -1;                 // that it packs of the batch's tree; -1 for all
};

// Counts over all steps that were run.
struct Totals {
  Statistics statistics;  // summed over steps
  int64_t steps = 0, requests = 0, unshared = 0, unpaid = 0;

  // `steps` steps of a plan.
  void add(const Statistics& plan, int64_t steps) {
    // Every step each request, and with it every tail that grows, has one token more.
    const int64_t grown = steps * (steps - 1) / 2;
    this->steps += steps;
    if (plan.unpacked == Unpacked::kUnshared) unshared += steps;
    if (plan.unpacked == Unpacked::kUnpaid) unpaid += steps;
    add_up(statistics.items, steps, plan.items);
    add_up(statistics.parts, steps, plan.parts);
    add_up(statistics.kv_tokens, steps, plan.kv_tokens);
    add_up(statistics.kv_tokens, grown, plan.growing_tails);
    add_up(statistics.seq_tokens, steps, plan.seq_tokens);
    add_up(statistics.seq_tokens, grown, plan.growing_tails);
    for (size_t i = 0; i < plan.query_sizes.size(); ++i) {
      add_up(statistics.query_sizes[i], steps, plan.query_sizes[i]);
      add_up(statistics.kv_by_queries[i], steps, plan.kv_by_queries[i]);
    }
    add_up(statistics.kv_by_queries[1], grown, plan.growing_tails);
  }

 private:
  // Counts wrap around, as no server lives so long; a trace may say that one did.
  static void add_up(int64_t& sum, int64_t times, int64_t count) {
    sum = int64_t(uint64_t(sum) + uint64_t(times) * uint64_t(count));
  }
};

// A plan's work items, bin after bin.
class Bins {
 public:
  std::vector<Pack> items;
  std::vector<int32_t> begins;     // of each bin in `items`, with the end of the last
  std::vector<int32_t> num_parts;  // of each query
  int64_t even_steps = 0;          // for which the bins stay even

  void reserve(size_t batch) {
    items.reserve(3 * batch + 1024);
    shared_.reserve(batch);
    single_.reserve(2 * batch);
    split_packs_.reserve(1024);
    split_priced_.reserve(1024);
    begins.reserve(1024);
    num_parts.reserve(batch);
  }

  // The first filling is kept at once; where a later one is better, it is made again to be kept.
  template <typename Grows>
  void fill(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, Statistics& statistics,
            Grows grows) {
    const Group single = price_all(packs.single, single_, packs, seq_lens, config, grows);
    Group shared = price_all(packs.shared, shared_, packs, seq_lens, config, grows);
    const int64_t bins = count(packs, config), mean = ceil_div(packs.work, bins);
    Filling best = fill_evenly<true>(shared, single, packs, config, bins);
    if (config.rebalance_queries > 0 && best.longest > mean + mean / kTooLong && are_few(shared, single, bins) &&
        split_long(packs.shared, config.rebalance_queries, bins)) {
      const Group pieces = price_all(split_packs_, split_priced_, packs, seq_lens, config, grows);
      const Filling filling = fill_evenly<false>(pieces, single, packs, config, bins);
      if (filling.longest + best.longest / kSplitGain <= best.longest) best = filling, shared = pieces;
    }
    if (!best.kept) fill_once<true>(shared, single, packs, config, bins, best.capacity);
    statistics.longest_bin = best.longest;
  }

 private:
  static constexpr int64_t kNone = -1;
  static constexpr int kWarps = 1, kAll = 2;  // who runs a work item; both together: a bin that has to switch

  // A pack that waits for a bin, or what is left of it: its price with its tails, and by how much a step makes it dearer.
  struct Waiting {
    int64_t price, growth;
    int32_t tokens;
    uint8_t kind;
    bool slices;
  };

  // Packs of several queries, or of one, with their prices and the sum of these.
  struct Group {
    const std::vector<Pack>* packs;
    const std::vector<Waiting>* waiting;
    int64_t price;

    size_t size() const { return packs->size(); }
  };

  // Packs that wait for a bin; of the first one, the KV before `start` is laid out.
  struct Queue {
    const std::vector<Pack>& packs;
    const std::vector<Waiting>& waiting;
    size_t index = 0;
    int32_t start = 0;
    Waiting first{};

    explicit Queue(const Group& group) : packs(*group.packs), waiting(*group.waiting) { look(); }

    bool empty() const { return index == packs.size(); }
    const Pack& pack() const { return packs[index]; }
    void take() { ++index, look(); }

    void cut(int32_t tokens, const Config& config) {
      const auto price = [&] { return config.item_price(config.bin_prices, pack().count, first.tokens, first.slices); };
      first.price -= price();
      start += tokens, first.tokens -= tokens;
      first.price += price();
    }

   private:
    void look() {
      if (!empty()) start = packs[index].start, first = waiting[index];
    }
  };

  template <typename Grows>
  static Group price_all(const std::vector<Pack>& all, std::vector<Waiting>& waiting, const Packs& packs,
                         const std::vector<int32_t>& seq_lens, const Config& config, Grows grows) {
    int64_t price = 0;
    const Prices& prices = config.bin_prices;
    waiting.resize(all.size());
    Waiting* one = waiting.data();
    // Field by field: a whole Waiting is put together in memory first, which takes longer than what is computed here.
    for (const Pack& pack : all) {
      const int32_t query = packs.queries[pack.first];
      one->tokens = (pack.end == kOpen ? seq_lens[query] : pack.end) - pack.start;
      one->slices = config.in_row_slices(pack.count, one->tokens);
      one->kind = config.by_warps(pack.count, one->slices) ? kWarps : kAll;
      one->price = config.item_price(prices, pack.count, one->tokens, one->slices);
      one->growth = pack.end == kOpen && grows(query) ? prices.growth(pack.count, one->slices) : 0;
      if (pack.tails) {
        one->price += packs.tail_tokens(pack, seq_lens) * prices.tokens[1];
        one->growth = pack.count * prices.tokens[1];
      }
      price += one->price;
      ++one;
    }
    return {&all, &waiting, price};
  }

  // Whether some bins cannot be filled without a cut: with eight packs for a bin, nearly every one can.
  static bool are_few(const Group& shared, const Group& single, int64_t bins) {
    return int64_t(shared.size() + single.size()) < 8 * bins;
  }

  // Splits all packs into pieces of at most `most` queries, each of even size; those with tails stay as they are. False if that changes none, or makes more
  // than there are bins. A piece of one query remains beside those of several.
  bool split_long(const std::vector<Pack>& packs, int most, int64_t bins) {
    split_packs_.clear();
    for (const Pack& pack : packs) {
      const int64_t size = pack.count, pieces = pack.tails ? 1 : ceil_div(size, most);
      if (int64_t(split_packs_.size()) + pieces > bins) return false;
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t first = size * i / pieces, end = size * (i + 1) / pieces;
        split_packs_.emplace_back(pack.start, pack.end, pack.first + first, end - first, pack.tails);
      }
    }
    return split_packs_.size() > packs.size();
  }

  // How to fill bins: up to `capacity`, or else to the average; the price of the longest one then. `kept`: it is what `items` has.
  struct Filling {
    int64_t capacity, longest;
    bool kept;
  };

  // Looks for the least capacity with which so many bins are enough, as MULTIFIT does (Coffman, Garey and Johnson 1978): above `least`, and
  // first at the average of bins with what cuts and turns have added.
  template <bool kKeepFirst>
  Filling fill_evenly(const Group& shared, const Group& single, const Packs& packs, const Config& config, int64_t bins) {
    Filled filled = fill_once<kKeepFirst>(shared, single, packs, config, bins, kNone);
    Filling best{kNone, filled.longest, kKeepFirst};
    int64_t least = ceil_div(shared.price + single.price, bins), capacity = ceil_div(filled.work, bins);
    if (best.longest <= capacity + capacity / kSlack) return best;
    for (int64_t pass = 1; pass < kPasses; ++pass) {
      filled = fill_once<false>(shared, single, packs, config, bins, capacity);
      const bool shorter = filled.longest < best.longest;
      if (shorter) best = {capacity, filled.longest, false};
      if (filled.last > capacity) {
        least = capacity;
        capacity = std::min((least + best.longest) / 2, capacity + ceil_div(filled.last - capacity, bins));
      } else if (shorter) {
        capacity = (least + capacity) / 2;
      } else {
        break;
      }
      if (best.longest <= least + least / kSlack) break;
    }
    return best;
  }

  struct Filled {
    int64_t work, longest, last;  // prices of all bins together, of the longest, of the last
  };

  // Fills each bin but the last, which takes the rest, up to `capacity`, or else to what remains on average. The bins are kept, or only their prices
  // are told.
  template <bool kKeep>
  Filled fill_once(const Group& shared_packs, const Group& single_packs, const Packs& packs, const Config& config,
                   int64_t bins, int64_t capacity) {
    if constexpr (kKeep) {
      // A bin cuts one pack at most.
      items.resize(shared_packs.size() + single_packs.size() + bins);
      begins.assign(1, 0);
      num_parts = packs.num_parts;
      // The first rows of such a query are in another pack.
      for (const auto* all : {shared_packs.packs, single_packs.packs})
        for (size_t i = 0; config.straddled_rows > 0 && i < all->size(); ++i)
          if ((*all)[i].first_row > 0) num_parts[packs.queries[(*all)[i].first]] += 1;
    }
    const Prices& prices = config.bin_prices;
    Pack* item = items.data();
    Queue shared(shared_packs), single(single_packs);
    int64_t remaining = shared_packs.price + single_packs.price;
    int64_t cuts = are_few(shared_packs, single_packs, bins), turns = 0;
    Filled filled{};
    int64_t growth = 0, most_growth = 0;
    for (int64_t left = bins; left > 0; --left) {
      int64_t target = capacity, slack = 0;
      if (capacity == kNone) {
        // The cuts to come will make work items of their own; as many for each bin as there were so far. So will bins with two
        // kinds of them cost what it takes to go from one to the other.
        int64_t ahead = prices.starts[1] * (left - 1) * cuts / (bins - left + 1);
        if (!shared.empty()) ahead += config.turn_price * (left - 1) * turns / (bins - left + 1);
        target = ceil_div(remaining + ahead, left), slack = target / kSlack;
      }
      int64_t load = 0, bin_growth = 0;
      int kinds = 0;
      while ((!shared.empty() || !single.empty()) && (load < target || left == 1)) {
        const int64_t gap = target - load;
        const auto turn_to = [&](const Queue& queue) {
          return kinds == ((kWarps | kAll) ^ queue.first.kind) ? config.turn_price : 0;
        };
        // The last bin takes all, a nearly full one what helps.
        const auto fits = [&](int64_t price) {
          return left == 1 || (price <= gap + slack && (gap > slack || price <= 2 * gap));
        };
        Queue* queue = shared.empty() ? &single : &shared;
        int64_t turn = turn_to(*queue);
        if (queue == &shared && !single.empty() && load > 0 && !fits(turn + shared.first.price))
          queue = &single, turn = turn_to(single);
        const Pack& pack = queue->pack();
        const Waiting& first = queue->first;
        const auto add_until = [&](int32_t end, bool tails) {
          if constexpr (kKeep) {
            *item = Pack(queue->start, end, pack.first, pack.count, tails, pack.first_row);
            item++->in_row_slices = first.slices;
          }
        };
        const auto take_whole = [&] {
          add_until(pack.end, pack.tails);
          bin_growth += first.growth;
          load += turn + first.price;
          queue->take();
        };
        if (fits(turn + first.price)) {
          kinds |= first.kind;
          remaining += turn;
          take_whole();
          continue;
        }
        // To the nearest grain, even where that is fewer tokens than single warps compute at a time: without such pieces `1,256_256,32` took 34 us
        // instead of 28 on an H200 (benchmarks/notes/prices.md, "Prices of an H200, and rows in slices"). Not where that is nothing or everything, nor into a
        // gap that is smaller than the start of one more work item. An empty bin reads for as long as it takes to start.
        const int64_t start = prices.fixed(pack.count, first.slices) + turn;
        const int64_t grain = prices.growth(pack.count, first.slices) * config.grain;
        const int64_t room = load == 0 ? std::max(gap - start, start) : std::max<int64_t>(0, gap - start);
        const bool pays = config.piece == 0 && (load == 0 || gap > std::max(slack, start));
        const int64_t cut = pays ? (room + grain / 2) / grain * config.grain : 0;
        if (cut > 0 && cut < first.tokens) {
          cuts += 1;
          add_until(queue->start + int32_t(cut), false);
          for (int32_t i = 0; kKeep && i < pack.count; ++i) num_parts[packs.queries[pack.first + i]] += 1;
          remaining += start;
          load += config.item_price(prices, pack.count, cut, first.slices) + turn;
          kinds |= first.kind;
          queue->cut(int32_t(cut), config);
        } else if (load == 0) {
          take_whole();
        }
        break;
      }
      turns += kinds == (kWarps | kAll);
      remaining -= load;
      if constexpr (kKeep) begins.push_back(int32_t(item - items.data()));
      filled.work += load, filled.last = load, filled.longest = std::max(filled.longest, load);
      growth += bin_growth, most_growth = std::max(most_growth, bin_growth);
    }
    if constexpr (kKeep) {
      items.resize(begins.back());
      const int64_t excess = most_growth * bins - growth;
      const int64_t allowed = std::max(filled.work / kUneven, bins * config.kv_tile * prices.tokens[1]);
      even_steps = excess > 0 ? std::max(kLeastSteps, allowed / excess) : INT32_MAX;
    }
    return filled;
  }

  // How many bins there are. A cut affects so many queries: the mean over packs, weighted by work, where packs shorter than a bin count as one
  // query, as they go into a bin whole, and the cut falls on a pack of one query beside them.
  int64_t count(const Packs& packs, const Config& config) const {
    const int64_t least = config.kv_tile * config.token_bytes + config.bin_prices.starts[1];
    const int64_t limit = std::max<int64_t>(1, packs.work / least);
    if (config.wave_price > 0 && packs.shared.empty() && !config.by_warps(1, false)) {
      int64_t cheapest = INT64_MAX, dearest = 0;
      bool by_all = true;
      for (const Waiting& one : single_) {
        cheapest = std::min(cheapest, one.price), dearest = std::max(dearest, one.price);
        by_all = by_all && one.kind == kAll;
      }
      const bool alike = dearest - cheapest <= dearest / kSlack;
      if (by_all) return config.num_bins_of_single(limit, int64_t(packs.single.size()), packs.work, alike);
    }
    const auto share = int64_t(__int128(packs.work) * config.runs / (2 * config.workers));
    double weighted_work = double(packs.work);
    bool narrow = config.warp_queries > 0;
    for (size_t i = 0; i < shared_.size(); ++i) {
      if (shared_[i].price > share) weighted_work += double(shared_[i].price) * (packs.shared[i].count - 1);
      narrow = narrow && shared_[i].kind == kWarps;
    }
    const double queries = weighted_work / double(std::max<int64_t>(1, packs.work));
    return config.num_bins(limit, double(packs.work), queries * double(config.part_bytes), narrow);
  }

  std::vector<Waiting> shared_, single_;  // as the packs
  std::vector<Pack> split_packs_;         // the shared packs, split
  std::vector<Waiting> split_priced_;     // as the pieces
};

}  // namespace pat
