// The packing that costs least by the model: tests/oracle/optimal.py, operation by operation, so that both round
// alike. Several segment starts are weighed at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "prices.h"
#include "pack.h"
#include "prefixes.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace pat {

class Optimal {
 public:
  // Decide for all prefixes; `choose` then gives the choices one by one, in preorder.
  void solve(const Prefixes& prefixes, const std::vector<int32_t>& seq_lens, const Config& config) {
    config_ = &config;
    seq_lens_ = seq_lens.data();
    prefixes_ = &prefixes;
    most_tails_ = most_tails(prefixes, config);
    part_ = double(config.part_bytes);
    start_ = double(config.pack_prices.starts[1]);
    const bool straddles = config.straddled_rows > 0;
    const int64_t rows = straddles ? config.group : 1, most = straddles ? config.straddled_rows : config.max_queries;
    full_token_ = double(config.pack_prices.tokens[config.max_queries] * rows) / double(most);
    full_start_ = double(config.pack_prices.starts[config.max_queries] * rows) / double(most);
    cut_token_ = 0;
    if (config.workers > config.runs) {
      const double share = double(prefixes.kv_minimum * config.runs) / config.workers;
      cut_token_ = part_ / std::max(double(config.kv_tile), share);
    }
    results_.resize(prefixes.nodes.size());
    if (prefixes.max_depth < kWidth)
      solve_all<1>(prefixes, shallow_);
    else
      solve_all<kMaxSegment / kWidth>(prefixes, deep_);
  }

  void choose(const Prefixes& prefixes, Choices& choices, int32_t index) {
    const Prefix& prefix = prefixes.nodes[index];
    Result& result = results_[index];
    // Where the segment begins, as a lane, and whether its queries have a part above it.
    const Result* parent = &results_[prefix.parent];
    if (prefix.parent == 0 || !choices.joins[index]) {
      result.lane = uint8_t(prefix.depth % kMaxSegment);
      result.above = prefix.parent != 0;
    } else {
      result.lane = parent->lane;
      result.above = parent->above;
    }
    const uint32_t lane = uint32_t(1) << result.lane;
    const Masks& masks = result.masks[result.above];
    const int candidate = masks.chosen[0] & lane ? 1 : masks.chosen[1] & lane ? 2 : 0;
    choices.leaves(prefix, candidate == 0 || masks.leaf_joins[candidate - 1] & lane);
    for (int32_t child = index + 1; child < prefix.last; child = prefixes.nodes[child].last)
      choices.joins[child] = candidate == 0 || results_[child].masks[result.above].joins[candidate - 1] & lane;
  }

  // How many tokens of tails a work item may have behind what its queries share; 0 if none has tails.
  static int64_t most_tails(const Prefixes& prefixes, const Config& config) {
    const int64_t least = kTailsItems * config.tails_queries * config.workers;
    if (config.tails_queries == 1 || int64_t(prefixes.order.size()) * config.runs < least) return 0;
    return prefixes.kv_minimum * config.runs / (kTailsShare * config.workers);
  }

  size_t bytes() const {
    return results_.capacity() * sizeof(Result) + shallow_.capacity() * sizeof(Frame<1>) +
           deep_.capacity() * sizeof(Frame<kMaxSegment / kWidth>);
  }

 private:
  // Lanes of a vector. Wider ones than the processor has go through memory.
#ifdef __AVX512DQ__
  static constexpr int kWidth = 8;
#else
  static constexpr int kWidth = 4;
#endif
  typedef double Vector __attribute__((vector_size(kWidth * sizeof(double))));
  typedef int64_t Lanes __attribute__((vector_size(kWidth * sizeof(int64_t))));

  // One bit for each lane; candidates 1 and 2, candidate 0 being that everything joins.
  struct Masks {
    uint32_t chosen[2], joins[2], leaf_joins[2];
  };

  struct Result {
    Masks masks[2];  // without and with a part above
    uint8_t lane, above;
  };

  // A prefix while its children are added up. Lane i stands for the segment that begins at the ancestor of depth i
  // modulo kMaxSegment.
  template <int kVectors>
  struct Frame {
    Vector tokens[kVectors], stay[kVectors], share[kVectors];
    Vector total[2][3][kVectors], staying[2][2][kVectors];
    Vector best[2][kVectors];
  };

  static uint32_t mask(Lanes comparison) {
#ifdef __AVX512DQ__
    return _mm512_movepi64_mask(__m512i(comparison));
#elif defined(__AVX__)
    return uint32_t(_mm256_movemask_pd(__m256d(comparison)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kWidth; ++i) bits |= uint32_t(comparison[i] & 1) << i;
    return bits;
#endif
  }

  static Vector select(Lanes condition, Vector yes, Vector no) { return condition ? yes : no; }

  // With this value in one lane. Not by x[lane] = value: that goes through memory, and what is stored by lanes and loaded as a whole is waited for.
  static Vector with_lane(Vector x, int lane, double value) {
    Lanes numbers;
    for (int i = 0; i < kWidth; ++i) numbers[i] = i;
    return select(numbers == int64_t(lane), Vector{} + value, x);
  }

  template <int kVectors>
  void solve_all(const Prefixes& prefixes, std::vector<Frame<kVectors>>& frames) {
    if (frames.size() < size_t(prefixes.max_depth + 1)) frames.resize(prefixes.max_depth + 1);
    for (int32_t index = int32_t(prefixes.nodes.size()) - 1; index > 0; --index) solve_one(prefixes, index, frames);
  }

  // How many vectors hold the lanes of a prefix.
  template <int kVectors>
  static int used(int32_t depth) {
    return kVectors == 1 ? 1 : (std::min(depth + 1, kMaxSegment) + kWidth - 1) / kWidth;
  }

  // How many lanes of such a vector stand for a segment's start: what takes long for each lane is computed for these only.
  static int lanes(int32_t depth, int v) { return std::min(std::min(depth + 1, kMaxSegment) - v * kWidth, kWidth); }

  // Everything about a prefix that its children do not add to. Children are solved from the last to the first, so the last prefix of a subtree opens
  // those above it. Lanes beyond a prefix's depth hold numbers that nobody chooses from.
  template <int kVectors>
  void open(const Prefixes& prefixes, int32_t index, std::vector<Frame<kVectors>>& frames) {
    const Prefix& prefix = prefixes.nodes[index];
    Frame<kVectors>& frame = frames[prefix.depth];
    if (prefix.parent != 0 && prefixes.nodes[prefix.parent].last == prefix.last) open(prefixes, prefix.parent, frames);
    const double length = prefix.end - prefix.start;
    const int own = prefix.depth % kMaxSegment, count = used<kVectors>(prefix.depth);
    for (int v = 0; v < count; ++v) {
      const bool inherits = prefix.parent != 0 && v < used<kVectors>(prefix.depth - 1);
      Vector tokens = inherits ? frames[prefix.depth - 1].tokens[v] + length : Vector{};
      if (own / kWidth == v) tokens = with_lane(tokens, own % kWidth, length);
      frame.tokens[v] = tokens;
      frame.stay[v] = part_ + tokens * cut_token_;
      frame.share[v] = tokens * full_token_ + full_start_;
    }
    if (prefix.last == index + 1) return;
    for (int above = 0; above < 2; ++above)
      for (int v = 0; v < count; ++v) {
        for (auto& total : frame.total[above]) total[v] = Vector{};
        for (auto& staying : frame.staying[above]) staying[v] = Vector{};
      }
  }

  template <int kVectors>
  void solve_one(const Prefixes& prefixes, int32_t index, std::vector<Frame<kVectors>>& frames) {
    const Prefix& prefix = prefixes.nodes[index];
    Frame<kVectors>& frame = frames[prefix.depth];
    if (prefix.last == index + 1) {
      open(prefixes, index, frames);
      weigh<kVectors, false>(prefix, frame, results_[index]);
    } else {
      weigh<kVectors, true>(prefix, frame, results_[index]);
    }
    if (prefix.parent != 0) add_to_parent(prefixes, index, frame, frames[prefix.depth - 1]);
  }

  // The best of the three candidates for every start, the children having been added up.
  template <int kVectors, bool kChildren>
  void weigh(const Prefix& prefix, Frame<kVectors>& frame, Result& result) {
    const int64_t together = leaves_together(*prefixes_, prefix, seq_lens_, *config_, most_tails_);
    const double leaves = prefix.leaves(), leaf_token = leaf_token_price(prefix, together) + cut_token_;
    const bool may_be_in_slices = together == 0 && config_->slices_tokens >= 0 && prefix.leaves() > 0;
    const int64_t tail = may_be_in_slices ? prefixes_->mean_tail(prefix, seq_lens_) : 0;
    uint32_t joined[2][2] = {}, chosen[2][2] = {};  // [above][candidate - 1]
    for (int v = 0; v < used<kVectors>(prefix.depth); ++v) {
      const Vector tokens = frame.tokens[v];
      const int starts = lanes(prefix.depth, v);
      const Vector leaf_alone = may_be_in_slices ? more_price(tail, tokens) : tokens * leaf_token;
      const Vector leaf_stays = frame.stay[v] + part_;
      const Vector limits[2] = {leaf_stays, leaf_stays + frame.share[v]};  // of each candidate: up to here a leaf joins
      // Who stays, of each candidate, and what their pack costs: mostly the same with a part above.
      Vector stays[2] = {}, prices[2] = {};
      for (int above = 0; above < 2; ++above) {
        const Vector leaf = leaf_alone + part_ * above;
        const auto children = [&](int candidate) { return kChildren ? frame.total[above][candidate][v] : Vector{}; };
        Vector best = children(0) + leaves * leaf;
        for (int candidate = 1; candidate < 3; ++candidate) {
          const Lanes joins = leaf <= limits[candidate - 1];
          Vector staying = select(joins, Vector{}, Vector{} + leaves);
          if (kChildren) staying += frame.staying[above][candidate - 1][v];
          if (above == 0 || mask(staying != stays[candidate - 1]) != 0)
            prices[candidate - 1] = pack_price(staying, tokens, starts);
          stays[candidate - 1] = staying;
          const Vector total = children(candidate) + leaves * select(joins, leaf, leaf_stays) + prices[candidate - 1];
          const Lanes better = total < best;
          best = select(better, total, best);
          joined[above][candidate - 1] |= mask(joins) << (v * kWidth);
          chosen[above][candidate - 1] |= mask(better) << (v * kWidth);
        }
        frame.best[above][v] = best;
      }
    }
    for (int above = 0; above < 2; ++above) {
      Masks& masks = result.masks[above];
      masks.chosen[0] = chosen[above][0] & ~chosen[above][1], masks.chosen[1] = chosen[above][1];
      masks.leaf_joins[0] = joined[above][0], masks.leaf_joins[1] = joined[above][1];
    }
  }

  template <int kVectors>
  void add_to_parent(const Prefixes& prefixes, int32_t index, const Frame<kVectors>& child, Frame<kVectors>& frame) {
    const Prefix& prefix = prefixes.nodes[index];
    const int own = prefix.depth % kMaxSegment;
    const double queries = prefix.queries();
    const double alone = child.best[1][own / kWidth][own % kWidth];
    const int count = used<kVectors>(prefix.depth - 1);
    for (int above = 0; above < 2; ++above) {
      uint32_t joining[2] = {};
      for (int v = 0; v < count; ++v) {
        Vector joined = child.best[above][v];
        // The child's own start has taken the lane of the one that is too far up for it.
        if (prefix.depth >= kMaxSegment && own / kWidth == v)
          joined = with_lane(joined, own % kWidth, std::numeric_limits<double>::infinity());
        const Vector split = alone + queries * frame.stay[v];
        frame.total[above][0][v] += joined;
        for (int candidate = 1; candidate < 3; ++candidate) {
          const Lanes joins = joined <= (candidate == 1 ? split : split + queries * frame.share[v]);
          frame.total[above][candidate][v] += select(joins, joined, split);
          frame.staying[above][candidate - 1][v] += select(joins, Vector{}, Vector{} + queries);
          joining[candidate - 1] |= mask(joins) << (v * kWidth);
        }
      }
      std::copy_n(joining, 2, results_[index].masks[above].joins);
    }
  }

  // A leaf's share of a token that `together` leaves read, or the price of one that it reads alone.
  double leaf_token_price(const Prefix& prefix, int64_t together) const {
    if (together == 0) return double(config_->pack_prices.tokens[1]);
    return double(ceil_div(prefix.leaves(), together) * config_->pack_prices.tokens[together]) / prefix.leaves();
  }

  // What it costs that a leaf with so long a tail reads `tokens` more.
  Vector more_price(int64_t tail, Vector tokens) const {
    const int64_t alone = config_->uncut_price(config_->pack_prices, 1, tail);
    const Lanes more =
        config_->uncut_price<Lanes>(config_->pack_prices, 1, tail + __builtin_convertvector(tokens, Lanes)) - alone;
    return __builtin_convertvector(more, Vector) + tokens * cut_token_;
  }

  Vector pack_price(Vector queries, Vector tokens, int lanes) const {
    const double limit = config_->max_queries;
    const bool one_item = mask(queries > limit) == 0;
    if (config_->flat) {
      const Vector item = tokens * double(config_->pack_prices.tokens[1]) + start_;
      return one_item ? select(queries > 0.0, item, Vector{}) : round_up(queries / limit) * item;
    }
    // Mostly the same queries stay wherever the segment begins, or none; and few are one work item, however short it is.
    const double staying = queries[0] > 0.0 ? queries[0] : queries[lanes - 1];
    const uint32_t others = mask(queries != staying) & mask(queries != 0.0) & ((1u << lanes) - 1);
    if (staying > 0.0 && staying <= config_->few_queries && others == 0) {
      const Lanes read = __builtin_convertvector(tokens, Lanes);
      const Lanes price = config_->uncut_price<Lanes>(config_->pack_prices, int64_t(staying), read);
      return select(queries > 0.0, __builtin_convertvector(price, Vector), Vector{});
    }
    Vector prices{};
    for (int i = 0; i < lanes; ++i)
      prices = with_lane(prices, i, double(config_->pack_price(int64_t(queries[i]), int64_t(tokens[i]))));
    return prices;
  }

  static Vector round_up(Vector x) {
    const Vector down = __builtin_convertvector(__builtin_convertvector(x, Lanes), Vector);
    return select(down < x, down + 1.0, down);
  }

  const Config* config_ = nullptr;
  const Prefixes* prefixes_ = nullptr;
  const int32_t* seq_lens_ = nullptr;
  int64_t most_tails_ = 0;
  double part_ = 0, start_ = 0, full_token_ = 0, full_start_ = 0, cut_token_ = 0;
  // One frame for each level; few prompts have more than eight.
  std::vector<Frame<1>> shallow_;
  std::vector<Frame<kMaxSegment / kWidth>> deep_;
  std::vector<Result> results_;
};

}  // namespace pat
