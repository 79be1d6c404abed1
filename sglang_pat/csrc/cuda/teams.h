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

// Summing up an item takes a team as long as 24 tokens take one warp (1.5 us; 32 tokens take it 2 us, benchmarks/NOTES.md).
constexpr int kSumTokens = 24;

// How long `kWarps` warps take for `count` items, of which the longest has `longest` tokens and all together have `total`,
// where teams of `team` warps share an item each; in tokens that one warp reads meanwhile.
template <int kWarps>
PAT_ANYWHERE constexpr int team_time(int team, int count, int longest, int total) {
  if (team == kWarps) return total / kWarps + kSumTokens * count;
  const int teams = kWarps / team;
  return (count + teams - 1) / teams * (longest / team + kSumTokens);
}

// The least time, and what place `warp` then has. Every division is by a constant: others are calls to code that is not in
// the instruction cache.
struct Team {
  TeamPlace place;
  int time;
};
template <int kWarps>
PAT_ANYWHERE constexpr Team best_team(int warp, int count, int longest, int total) {
  Team best{{uint8_t(kWarps), uint8_t(warp), 1, 0}, team_time<kWarps>(kWarps, count, longest, total)};
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int team = kWarps / 2; team > 1; --team) {
    if (kWarps % team != 0) continue;
    const int time = team_time<kWarps>(team, count, longest, total);
    if (time < best.time)
      best = {{uint8_t(team), uint8_t(warp % team), uint8_t(kWarps / team), uint8_t(warp / team)}, time};
  }
  return best;
}

// Whether an item of `tokens` tokens is better shared. Where there is one for every warp they are busy either way, and what is
// shared has to be summed up: then only the longest are, by all warps, so that none has to finish alone.
template <int kWarps>
PAT_ANYWHERE constexpr bool too_long(int tokens, int count, int longest, int total) {
  if (count < kWarps) return tokens > best_team<kWarps>(0, count, longest, total).time;
  const int rounds = (count + kWarps - 1) / kWarps;
  return tokens * rounds > team_time<kWarps>(kWarps, count, longest, total);
}

}  // namespace pat
