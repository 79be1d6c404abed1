// Balances packs over bins (sglang_pat/packing/balance.py) and writes the plan that layout.h describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "prices.h"
#include "layout.h"
#include "pack.h"

namespace pat {

// Does not fit the buffers; the caller falls back to a plan that does.
struct TooLarge : std::length_error {
  using std::length_error::length_error;
};

// What is counted per step that a plan runs.
struct Statistics {
  int64_t items = 0, parts = 0, kv_tokens = 0, open_items = 0, seq_tokens = 0, longest_bin = 0;
  std::vector<int64_t> query_sizes;  // work items with so many queries
};

class PlanWriter {
 public:
  void reserve(size_t batch) {
    items_.reserve(3 * batch);
    bins_.reserve(1024);
    next_slots_.reserve(batch);
    num_parts_.reserve(batch);
  }

  // Writes to `out` of `capacity` ints; at most `max_slots` slots of the workspace are used. Packs are of the tokens that requests see,
  // `seq_lens` of those `lengths` that they have.
  void write(const Packs& packs, const std::vector<int32_t>& seq_lens, const std::vector<int32_t>& lengths,
             const Config& config, int32_t* out, int64_t capacity, int64_t max_slots, Statistics& statistics) {
    const auto grows = [&](int32_t query) { return config.window == 0 || lengths[query] <= config.window; };
    balance(packs, seq_lens, config, statistics, grows);
    emit(packs, seq_lens, config, out, capacity, max_slots, statistics, grows);
    if (config.window == 0) return;
    // Until a window that is not full yet is.
    for (const int32_t length : lengths)
      if (length <= config.window) out[kSteps] = std::min(out[kSteps], config.window - length + 1);
  }

 private:
  // Packs that wait for a bin; of the first one, the KV before `begin` is already laid out.
  struct Queue {
    const std::vector<Pack>& packs;
    size_t index;
    int32_t begin;

    bool empty() const { return index == packs.size(); }
    int32_t start() const { return std::max(begin, packs[index].start); }
  };

  template <typename Grows>
  void balance(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, Statistics& statistics,
               Grows grows) {
    items_.clear();
    bins_.assign(1, 0);
    statistics.longest_bin = 0;
    num_parts_ = packs.num_parts;
    int64_t remaining = packs.work;
    const auto share = int64_t(__int128(remaining) * config.kv_heads / (2 * config.workers));
    double weighted_work = double(packs.work);
    for (const Pack& pack : packs.shared) {
      const int64_t price = config.item_price(pack.count, pack.end - pack.start);
      if (price > share) weighted_work += double(price) * (pack.count - 1);
    }
    const double queries = weighted_work / double(std::max<int64_t>(1, packs.work));
    const int64_t least = config.kv_tiles.back() * config.token_bytes + config.start_prices[1];
    Queue shared{packs.shared, 0, 0}, single{packs.single, 0, 0};
    const auto tokens_of = [&](const Queue& queue) {
      const Pack& pack = queue.packs[queue.index];
      return int64_t(pack.end == kOpen ? seq_lens[packs.queries[pack.first]] : pack.end) - queue.start();
    };
    const auto count_of = [&](const Queue& queue) { return queue.packs[queue.index].count; };
    bool narrow = config.warp_queries > 0;
    for (const Pack& pack : packs.shared) narrow = narrow && pack.count <= config.warp_queries;
    int64_t left = config.bins(std::max<int64_t>(1, remaining / least), double(remaining),
                               queries * double(config.part_bytes), narrow);
    // With eight packs for a bin, nearly every bin can be filled without a cut.
    int64_t cuts = int64_t(packs.shared.size() + packs.single.size()) < 8 * left;
    int64_t work = 0, growth = 0, most_growth = 0, turns = 0;
    for (; left > 0; --left) {
      // The cuts to come will make work items of their own; as many for each bin as there were so far. So will bins with two
      // kinds of them cost what it takes to go from one to the other.
      int64_t ahead = config.start_prices[1] * (left - 1) * cuts / int64_t(bins_.size());
      if (!shared.empty()) ahead += config.turn_price * (left - 1) * turns / int64_t(bins_.size());
      const int64_t target = ceil_div(remaining + ahead, left), slack = target / kSlack;
      int64_t load = 0, bin_growth = 0;
      int kinds = 0;
      const auto kind_of = [&](int64_t count) { return count <= config.warp_queries ? 1 : 2; };
      const auto turn_to = [&](int64_t count) { return kinds == (3 ^ kind_of(count)) ? config.turn_price : 0; };
      const auto take_whole = [&](Queue& queue, int64_t price) {
        const Pack& pack = queue.packs[queue.index];
        items_.push_back(Pack{queue.start(), pack.end, pack.first, pack.count});
        if (pack.end == kOpen && grows(packs.queries[pack.first])) bin_growth += config.token_prices[pack.count];
        queue.index += 1;
        queue.begin = 0;
        load += price;
      };
      while ((!shared.empty() || !single.empty()) && (load < target || left == 1)) {
        const int64_t gap = target - load;
        // The last bin takes all, a nearly full one what helps.
        const auto fits = [&](int64_t price) {
          return left == 1 || (price <= gap + slack && (gap > slack || price <= 2 * gap));
        };
        Queue* queue = shared.empty() ? &single : &shared;
        int64_t tokens = 0, turn = 0, price = 0;
        const auto look_at = [&](Queue& at) {
          queue = &at;
          tokens = tokens_of(at), turn = turn_to(count_of(at));
          price = config.item_price(count_of(at), tokens) + turn;
        };
        look_at(*queue);
        if (queue == &shared && !single.empty() && load > 0 && !fits(price)) look_at(single);
        const Pack& pack = queue->packs[queue->index];
        const int32_t start = queue->start();
        if (fits(price)) {
          kinds |= kind_of(pack.count);
          remaining += turn;
          take_whole(*queue, price);
          continue;
        }
        // To the nearest grain; not where that is nothing or everything, nor into a gap that is smaller than the start
        // of one more work item. An empty bin reads for as long as it takes to start.
        const int64_t token_price = config.token_prices[pack.count], begin = config.start_prices[pack.count] + turn;
        const int64_t room = load == 0 ? std::max(gap - begin, begin) : std::max<int64_t>(0, gap - begin);
        const int64_t grains = (room + token_price * kGrain / 2) / (token_price * kGrain);
        const int64_t cut = load == 0 || gap > std::max(slack, begin) ? grains * kGrain : 0;
        if (cut > 0 && cut < tokens) {
          cuts += 1;
          queue->begin = start + int32_t(cut);
          items_.push_back(Pack{start, queue->begin, pack.first, pack.count});
          for (int32_t i = 0; i < pack.count; ++i) num_parts_[packs.queries[pack.first + i]] += 1;
          remaining += begin;
          load += cut * token_price + begin;
          kinds |= kind_of(pack.count);
        } else if (load == 0) {
          take_whole(*queue, price);
        }
        break;
      }
      turns += kinds == 3;
      remaining -= load;
      statistics.longest_bin = std::max(statistics.longest_bin, load);
      bins_.push_back(int32_t(items_.size()));
      work += load;
      growth += bin_growth;
      most_growth = std::max(most_growth, bin_growth);
    }
    const int64_t bins = int64_t(bins_.size()) - 1, excess = most_growth * bins - growth;
    const int64_t allowed = std::max(work / kUneven, bins * config.kv_tiles.back() * config.token_prices[1]);
    even_steps_ = excess > 0 ? std::max(kLeastSteps, allowed / excess) : INT32_MAX;
  }

  template <typename Grows>
  void emit(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, int32_t* out, int64_t capacity,
            int64_t max_slots, Statistics& statistics, Grows grows) {
    const int64_t batch = int64_t(seq_lens.size());
    int64_t num_queries = 0;
    for (const Pack& item : items_) num_queries += item.count;
    const int64_t sizes[] = {int64_t(bins_.size()), int64_t(items_.size()) * kItemSize, num_queries, num_queries,
                             batch + 1};
    const int64_t size = std::accumulate(std::begin(sizes), std::end(sizes), int64_t(kHeaderSize));
    if (size > capacity)
      throw TooLarge("a plan of " + std::to_string(size) + " ints does not fit its buffer of " + std::to_string(capacity));
    out[kNumItems] = int32_t(items_.size());
    out[kNumQueries] = int32_t(num_queries);
    out[kNumBins] = int32_t(bins_.size()) - 1;
    out[kBatch] = int32_t(batch);
    out[kBins] = kHeaderSize;
    for (int section = 0; section < 5; ++section) out[kBins + section + 1] = out[kBins + section] + int32_t(sizes[section]);

    statistics.query_sizes.assign(config.max_queries + 1, 0);
    int32_t* row = out + out[kItems];
    int32_t* queries = out + out[kQueries];
    int64_t kv_tokens = 0, longest = config.kv_tiles.back(), longest_tail = 0, single = 0;
    const int32_t single_tile = config.query_tile(1);
    int32_t first = 0;
    for (const Pack& item : items_) {
      const int32_t* members = &packs.queries[item.first];
      const int64_t tokens = int64_t(item.end == kOpen ? seq_lens[members[0]] : item.end) - item.start;
      const bool growing = grows(members[0]);
      // A window that is full moves along with its request's end.
      const int32_t back = growing ? 0 : config.window - kOpen;
      row[kStart] = item.start - back;
      row[kEnd] = item.end == kOpen ? kOpen : item.end - back;
      row[kFirstQuery] = first;
      row[kItemQueries] = item.count;
      row[kTileN] = config.kv_tile(tokens);
      if (item.count == 1) {
        row[kTileM] = single_tile;
        queries[first] = members[0];
        ++single;
      } else {
        row[kTileM] = config.query_tile(item.count);
        std::copy_n(members, item.count, queries + first);
        statistics.query_sizes[item.count] += 1;
      }
      row[kQuery] = queries[first];
      row += kItemSize;
      first += item.count;
      kv_tokens += tokens;
      longest = std::max(longest, tokens);
      longest_tail = std::max(longest_tail, item.end == kOpen && growing ? tokens : 0);
    }
    statistics.query_sizes[1] = single;
    int32_t* offsets = out + out[kPartOffsets];
    next_slots_.resize(batch);
    int32_t slots = 0;
    for (int64_t query = 0; query < batch; ++query) {
      const bool merged = num_parts_[query] > 1;
      offsets[query] = slots;
      next_slots_[query] = merged ? slots : kDirect;
      slots += merged ? num_parts_[query] : 0;
    }
    offsets[batch] = slots;
    if (slots > max_slots)
      throw TooLarge("a plan of " + std::to_string(slots) + " parts does not fit a workspace of " +
                     std::to_string(max_slots));
    int32_t* to = out + out[kSlots];
    for (int64_t i = 0; i < num_queries; ++i) {
      int32_t& next = next_slots_[queries[i]];
      to[i] = next;
      next += next != kDirect;
    }
    row = out + out[kItems];
    for (size_t i = 0; i < items_.size(); ++i, row += kItemSize) row[kSlot] = to[row[kFirstQuery]];
    std::copy(bins_.begin(), bins_.end(), out + out[kBins]);
    out[kNumSlots] = slots;
    out[kSteps] = int32_t(std::min<int64_t>({kTailGrowth * longest - longest_tail, even_steps_, INT32_MAX}));
    statistics.items = int64_t(items_.size());
    statistics.parts = slots;
    statistics.kv_tokens = kv_tokens;
    statistics.open_items = 0;
    for (int64_t query = 0; query < batch; ++query) statistics.open_items += grows(int32_t(query));
    statistics.seq_tokens = 0;
    for (const int32_t tokens : seq_lens) statistics.seq_tokens += tokens;
  }

  std::vector<Pack> items_;
  std::vector<int32_t> bins_, next_slots_, num_parts_;
  int64_t even_steps_ = 0;  // for which the bins stay even
};

}  // namespace pat
