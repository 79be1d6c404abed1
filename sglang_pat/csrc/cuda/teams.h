// How warps share items of up to 16 rows: each has some of its own, and teams of several share the longest. Plain arithmetic,
// which the host's compiler understands too (tests/test_teams.py).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PAT_ANYWHERE __host__ __device__
#else
#define PAT_ANYWHERE
#endif

namespace pat {

// Of how many warps and teams a warp is which.
struct TeamPlace {
  uint8_t warps, warp, teams, team;
};

// Items: how many, the longest, and all together; in tokens.
struct ItemSum {
  int count, longest, tokens;
};

// x / by. Integer division by a runtime value is a call on a GPU, to code outside the instruction cache: so by floats. Exact below 2^21;
// beyond, who shares what may depend on the rounding.
PAT_ANYWHERE constexpr int quotient(int x, int by) {
#ifdef __CUDA_ARCH__
  return int(__fdividef(float(x) + 0.5f, float(by)));
#else
  return x / by;
#endif
}

// Summing up an item takes a team as long as 24 tokens take one warp (1.5 us; 32 tokens take it 2 us, benchmarks/NOTES.md).
constexpr int kSumTokens = 24;

// Sharing what is left over has to save more than so many tokens: items of 256 tokens gain 3 to 5 %, of 128 up to 2, and those of 32 and 64 lost as
// much, which the model does not say (benchmarks/NOTES.md, "Ends of workers").
constexpr int kLeastLeftOver = 64;

// How long `kWarps` warps take for these items if each is shared by a team of `team` warps; in tokens that one warp reads in that time.
template <int kWarps>
PAT_ANYWHERE constexpr int team_time(int team, const ItemSum& items) {
  if (team == kWarps) return items.tokens / kWarps + kSumTokens * items.count;
  const int teams = quotient(kWarps, team);
  return quotient(items.count + teams - 1, teams) * (quotient(items.longest, team) + kSumTokens);
}

// Sort key of a team size: the least is the fastest, and among equally fast ones the largest team. ~0 for sizes that do not divide kWarps.
constexpr int kRankBits = 4;
template <int kWarps>
PAT_ANYWHERE constexpr uint32_t team_rank(int team, const ItemSum& items) {
  static_assert(kWarps < 1 << kRankBits);
  if (team < 2 || team > kWarps || quotient(kWarps, team) * team != kWarps) return ~0u;
  return uint32_t(team_time<kWarps>(team, items)) << kRankBits | uint32_t(kWarps - team);
}

// What `warp` does in teams of that rank, and the time that they take.
template <int kWarps>
PAT_ANYWHERE constexpr TeamPlace team_place(uint32_t rank, int warp) {
  const int team = kWarps - int(rank % (1 << kRankBits));
  const int teams = quotient(kWarps, team), which = quotient(warp, team);
  return {uint8_t(team), uint8_t(warp - which * team), uint8_t(teams), uint8_t(which)};
}
PAT_ANYWHERE constexpr int rank_time(uint32_t rank) { return int(rank >> kRankBits); }

// Items of up to so many tokens are better left to one warp; `best` is the rank of the teams that would share the others. With fewer items
// than warps, sharing pays as soon as it is faster. With an item for every warp all are busy anyway, and sharing adds the summing up: then
// only the longest are shared, by all warps, so that no warp finishes alone.
template <int kWarps>
PAT_ANYWHERE constexpr int own_tokens(uint32_t best, const ItemSum& items) {
  if (items.count < kWarps) return rank_time(best);
  return quotient(team_time<kWarps>(kWarps, items), (items.count + kWarps - 1) / kWarps);
}

// Of items that single warps have for themselves, how many remain when each warp has had equally many: with them a few warps run one more while the
// others have nothing to do, so the first ones are shared instead. 0 where that does not pay: where lengths differ those may be the short ones, and of more
// than half as many as there are warps no team would have two.
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

}  // namespace pat
