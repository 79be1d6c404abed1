// How a CTA's warps divide narrow work items: a short item is one warp's, a long one is shared by a team of warps, which
// split its KV between them and merge at the end. assign.cuh calls this once for each look-up. Plain arithmetic, which the
// host's compiler builds too (tests/test_teams.py).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PAT_ANYWHERE __host__ __device__
#else
#define PAT_ANYWHERE
#endif

namespace pat {

// A warp's place: it is number `warp` of `warps` in its team, which is number `team` of `teams`.
struct TeamPlace {
  uint8_t warps, warp, teams, team;
};

// How many items, the tokens of the longest, and the tokens of all.
struct ItemSum {
  int count, longest, tokens;
};

// x / by, through floats: integer division by a runtime value is a call to code outside the instruction cache. Exact below
// 2^21; beyond, rounding may only change which warps share an item.
PAT_ANYWHERE constexpr int quotient(int x, int by) {
#ifdef __CUDA_ARCH__
  return int(__fdividef(float(x) + 0.5f, float(by)));
#else
  return x / by;
#endif
}

// Merging a team's results takes as long as 24 tokens take one warp: 1.5 us, where 32 tokens take 2 us
// (benchmarks/notes/kernels-narrow.md, "What a small batch waits for").
constexpr int kSumTokens = 24;

// Sharing left-over items has to save more than this many tokens. Measured: items of 256 tokens gain 3 to 5 %, of 128 up to
// 2 %, and those of 32 and 64 lose as much, which the model does not predict
// (benchmarks/notes/kernels-narrow.md, "Left-over items").
constexpr int kLeastLeftOver = 64;

// Time of `kWarps` warps for these items if teams of `team` warps share each; the unit is what one warp takes for a token.
template <int kWarps>
PAT_ANYWHERE constexpr int team_time(int team, const ItemSum& items) {
  if (team == kWarps) return items.tokens / kWarps + kSumTokens * items.count;
  const int teams = quotient(kWarps, team);
  return quotient(items.count + teams - 1, teams) * (quotient(items.longest, team) + kSumTokens);
}

// Sort key of a team size: least is fastest, and of equally fast sizes the largest team is least. ~0 if the size does not
// divide kWarps.
constexpr int kRankBits = 4;
template <int kWarps>
PAT_ANYWHERE constexpr uint32_t team_rank(int team, const ItemSum& items) {
  static_assert(kWarps < 1 << kRankBits);
  if (team < 2 || team > kWarps || quotient(kWarps, team) * team != kWarps) return ~0u;
  return uint32_t(team_time<kWarps>(team, items)) << kRankBits | uint32_t(kWarps - team);
}

// The place of `warp` in teams of that rank; and below, the time of such teams.
template <int kWarps>
PAT_ANYWHERE constexpr TeamPlace team_place(uint32_t rank, int warp) {
  const int team = kWarps - int(rank % (1 << kRankBits));
  const int teams = quotient(kWarps, team), which = quotient(warp, team);
  return {uint8_t(team), uint8_t(warp - which * team), uint8_t(teams), uint8_t(which)};
}
PAT_ANYWHERE constexpr int rank_time(uint32_t rank) { return int(rank >> kRankBits); }

// When each warp has had equally many items of its own, this many remain. A few warps would run one more while the others
// idle, so as many items are shared instead. 0 where that does not pay: with unequal lengths the shared ones may be the
// short ones, and if more than half as many remain as there are warps, no team would have two warps.
template <int kWarps>
PAT_ANYWHERE constexpr int left_over(const ItemSum& alone) {
  const int count = alone.count < kWarps ? 0 : alone.count % kWarps;
  if (count == 0 || count > kWarps / 2) return 0;
  // By the mean, without a division; where these products leave 32 bits, who shares what may depend on that.
  const bool alike = 2 * unsigned(alone.longest) * alone.count <= 3 * unsigned(alone.tokens);
  const bool pays =
      unsigned(alone.tokens) * (kWarps - count) > (kSumTokens + kLeastLeftOver) * kWarps * unsigned(alone.count);
  return alike && pays ? count : 0;
}

// Items of up to this many tokens stay with one warp, `left` (`left_over`) of them excepted; `best` is the rank of the teams
// that would share the others. With fewer items than warps, sharing pays as soon as it is faster. Otherwise all warps are
// busy anyway and sharing only adds merges: then only the longest items are shared, by all warps, so that no warp finishes
// alone. If those that are left over are shared in any case, each of the others may take a warp as long as all warps take
// for as many items as they are.
template <int kWarps>
PAT_ANYWHERE constexpr int own_tokens(uint32_t best, const ItemSum& items, int left) {
  if (items.count < kWarps) return rank_time(best);
  const bool shares = left > 0;
  return quotient(shares ? items.tokens : team_time<kWarps>(kWarps, items),
                  shares ? items.count : (items.count + kWarps - 1) / kWarps) +
         (shares ? kSumTokens * kWarps : 0);
}

}  // namespace pat
