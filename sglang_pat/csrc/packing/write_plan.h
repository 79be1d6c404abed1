// Writes the plan that layout.h describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "balance.h"
#include "layout.h"

namespace pat {

class PlanWriter {
 public:
  void reserve(size_t batch) {
    bins_.reserve(batch);
    next_slots_.reserve(batch);
  }

  // Writes to `out` of `capacity` ints; at most `max_slots` slots of the workspace are used. Packs are of the tokens that requests see,
  // `seq_lens` of those `lengths` that they have.
  void write(const Packs& packs, const std::vector<int32_t>& seq_lens, const std::vector<int32_t>& lengths,
             const Config& config, int32_t* out, int64_t capacity, int64_t max_slots, Statistics& statistics) {
    // Asked for each work item: where nothing has a window, the compiler drops the question.
    const auto write_with = [&](auto grows) {
      bins_.fill(packs, seq_lens, config, statistics, grows);
      emit(packs, seq_lens, config, out, capacity, max_slots, statistics, grows);
    };
    if (config.window == 0 || config.piece > 0)
      write_with([](int32_t) { return true; });
    else
      write_with([&](int32_t query) { return lengths[query] <= config.window; });
    if (config.window == 0 && config.piece == 0) return;
    int32_t& steps = out[kSteps];
    // Until a window that is not full yet is; with pieces, until a request needs one more, or its window one less.
    for (const int32_t length : lengths) {
      if (length <= config.window) steps = std::min(steps, config.window - length + 1);
      if (config.piece == 0) continue;
      steps = std::min(steps, length == 0 ? 1 : config.piece - (length - 1) % config.piece);
      if (config.window > 0 && length > config.window)
        steps = std::min(steps, config.piece - (length - config.window) % config.piece);
    }
  }

  // Of the plan that was written last; its packs' queries are not here.
  const Bins& bins() const { return bins_; }

 private:
  // Tokens of all work items, of the longest one, of the longest tail that grows, and of the longest one with several tails; and whether single
  // warps run some.
  struct Tokens {
    int64_t all, longest, longest_tail, longest_with_tails;
    bool narrow;
  };

  template <typename Grows>
  void emit(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, int32_t* out, int64_t capacity,
            int64_t max_slots, Statistics& statistics, Grows grows) {
    const int32_t batch = int32_t(seq_lens.size());
    const int64_t num_queries = write_header(batch, config, out, capacity);
    statistics.query_sizes.assign(config.max_queries + 1, 0);
    statistics.kv_by_queries.assign(config.max_queries + 1, 0);
    const Tokens read = write_items(packs, seq_lens, config, out, statistics, grows);
    write_slots(batch, num_queries, max_slots, seq_lens, config.piece, out);
    if (config.straddled_rows > 0) write_rows(config, out);
    std::copy(bins_.begins.begin(), bins_.begins.end(), out + out[kBins]);
    int64_t steps = std::min<int64_t>({kTailGrowth * read.longest - read.longest_tail, bins_.even_steps, INT32_MAX});
    // Each of its queries becomes longer.
    if (read.longest_with_tails > 0)
      steps = std::min(steps, (kTailGrowth * read.longest - read.longest_with_tails) / config.tails_queries);
    out[kSteps] = int32_t(steps);
    out[kNarrowFirst] = read.narrow && config.narrow_first_price > 0 && packs.computing >= config.narrow_first_price;
    statistics.items = int64_t(bins_.items.size());
    statistics.parts = out[kNumSlots];
    statistics.kv_tokens = read.all;
    // With pieces, `seq_lens` are whole requests, of which a window still is all that is read.
    const int32_t window = config.window > 0 ? config.window : INT32_MAX;
    statistics.growing_tails = statistics.seq_tokens = 0;
    for (int32_t query = 0; query < batch; ++query) {
      statistics.growing_tails += grows(query) && seq_lens[query] <= window;
      statistics.seq_tokens += std::min(seq_lens[query], window);
    }
  }

  // Counts, and where the sections begin; returns the queries of all work items together.
  int64_t write_header(int64_t batch, const Config& config, int32_t* out, int64_t capacity) const {
    int64_t num_queries = 0, part_rows = 0;
    for (const Pack& item : bins_.items) num_queries += item.count;
    for (int64_t query = 0; config.straddled_rows > 0 && query < batch; ++query)
      part_rows += bins_.num_parts[query] > 1 ? bins_.num_parts[query] : 0;
    const int64_t sizes[] = {int64_t(bins_.begins.size()), int64_t(bins_.items.size()) * kItemSize, num_queries,
                             num_queries, batch + 1 + part_rows};
    const int64_t size = std::accumulate(std::begin(sizes), std::end(sizes), int64_t(kHeaderSize));
    if (size > std::min<int64_t>(capacity, INT32_MAX))
      throw TooLarge("a plan of " + std::to_string(size) + " ints does not fit its buffer of " + std::to_string(capacity));
    out[kNumItems] = int32_t(bins_.items.size());
    out[kNumQueries] = int32_t(num_queries);
    out[kNumBins] = int32_t(bins_.begins.size()) - 1;
    out[kBatch] = int32_t(batch);
    out[kBins] = kHeaderSize;
    for (int section = 0; section < 5; ++section) out[kBins + section + 1] = out[kBins + section] + int32_t(sizes[section]);
    return num_queries;
  }

  // The work items but for their slots, and their queries.
  template <typename Grows>
  Tokens write_items(const Packs& packs, const std::vector<int32_t>& seq_lens, const Config& config, int32_t* out,
                     Statistics& statistics, Grows grows) const {
    Tokens read{0, config.kv_tile, 0, 0, false};
    int32_t* row = out + out[kItems];
    int32_t* queries = out + out[kQueries];
    const int32_t single_tile = config.query_tile(1), window = config.window;
    int32_t first = 0, single = 0;
    int64_t together = 0;
    for (const Pack& item : bins_.items) {
      const int32_t* members = &packs.queries[item.first];
      const int64_t shared = int64_t(item.end == kOpen ? seq_lens[members[0]] : item.end) - item.start;
      const int64_t tokens = shared + packs.tail_tokens(item, seq_lens);
      const bool growing = grows(members[0]);
      // A window that is full moves along with its request's end.
      const int32_t back = growing ? 0 : window - kOpen;
      row[kStart] = item.start - back;
      if (config.piece > 0 && window > 0 && item.start > 0 && item.start == seq_lens[members[0]] - window)
        row[kStart] = kOpen - window;
      row[kEnd] = item.end == kOpen ? kOpen : item.end - back;
      row[kFirstQuery] = first;
      row[kItemQueries] = item.count;
      row[kTails] = item.tails;
      read.narrow |= config.by_warps(item.count, item.in_row_slices);
      if (item.count == 1) {
        row[kTileM] = item.in_row_slices ? config.slice_rows : single_tile;
        queries[first] = members[0];
        ++single;
      } else {
        row[kTileM] = config.query_tile(item.count);
        std::copy_n(members, item.count, queries + first);
        statistics.query_sizes[item.count] += 1;
        statistics.kv_by_queries[item.count] += shared;
        together += shared;
      }
      if (config.straddled_rows > 0)
        row[kTileM] = config.tile_of_rows(end_row(item, config) - item.first_row) | item.first_row << kFirstRowShift;
      row[kQuery] = queries[first];
      row += kItemSize;
      first += item.count;
      read.all += tokens;
      read.longest = std::max(read.longest, tokens);
      read.longest_tail = std::max(read.longest_tail, item.end == kOpen && growing ? tokens : 0);
      if (item.tails) read.longest_with_tails = std::max(read.longest_with_tails, tokens);
    }
    statistics.query_sizes[1] = single;
    statistics.kv_by_queries[1] = read.all - together;  // tails, too, are read for one query each
    return read;
  }

  // Where each part goes.
  void write_slots(int32_t batch, int64_t num_queries, int64_t max_slots, const std::vector<int32_t>& seq_lens,
                   int32_t piece, int32_t* out) {
    int32_t* offsets = out + out[kPartOffsets];
    next_slots_.resize(batch);
    int32_t slots = 0;
    for (int32_t query = 0; query < batch; ++query) {
      const bool merged = piece > 0 || bins_.num_parts[query] > 1;  // a part is rounded, also if it is the only one
      offsets[query] = slots;
      next_slots_[query] = merged ? slots : kDirect;
      slots += merged ? bins_.num_parts[query] : 0;
    }
    offsets[batch] = slots;
    if (slots > max_slots)
      throw TooLarge("a plan of " + std::to_string(slots) + " parts does not fit a workspace of " +
                     std::to_string(max_slots));
    out[kNumSlots] = slots;
    const int32_t* queries = out + out[kQueries];
    int32_t* to = out + out[kSlots];
    for (int64_t i = 0; i < num_queries; ++i) {
      int32_t& next = next_slots_[queries[i]];
      to[i] = next;
      next += next != kDirect;
    }
    // With pieces, parts are in order of position: a merge adds them in this order.
    int32_t* place = to;
    for (size_t i = 0; piece > 0 && i < bins_.items.size(); ++i)
      for (int32_t j = 0; j < bins_.items[i].count; ++j, ++queries, ++place)
        *place = offsets[*queries + 1] - 1 - (seq_lens[*queries] - 1) / piece + bins_.items[i].start / piece;
    int32_t* row = out + out[kItems];
    for (size_t i = 0; i < bins_.items.size(); ++i, row += kItemSize) row[kSlot] = to[row[kFirstQuery]];
  }

  // Behind the last of a work item's rows, counted from its first query's first one.
  static int32_t end_row(const Pack& item, const Config& config) {
    return std::min<int32_t>(item.first_row + config.straddled_rows, item.count * config.group);
  }

  // Which rows of its query each part has.
  void write_rows(const Config& config, int32_t* out) const {
    const int32_t* slot = out + out[kSlots];
    int32_t* const rows = out + out[kPartOffsets] + out[kBatch] + 1;
    for (const Pack& item : bins_.items) {
      const int32_t end = end_row(item, config);
      for (int32_t i = 0; i < item.count; ++i, ++slot) {
        const int32_t before = i * config.group, first = std::max(0, item.first_row - before);
        if (*slot == kDirect) continue;
        rows[*slot] = item.whole() ? kAllRows : first | std::min(config.group, end - before) << kPartEndShift;
      }
    }
  }

  Bins bins_;
  std::vector<int32_t> next_slots_;
};

}  // namespace pat
