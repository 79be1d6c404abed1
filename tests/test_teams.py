"""How warps share items (csrc/cuda/teams.h), compiled for the host: all that there is, against the model it stands for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_pat import jit

pytestmark = pytest.mark.once

PROGRAM = """
#include "cuda/teams.h"
#include <algorithm>
#include <cstdio>
#include <initializer_list>

using namespace pat;

#define CHECK(condition) \\
  if (!(condition)) return std::printf("%s: %d warps, %d items, longest %d, total %d\\n", #condition, W, count, longest, total), 1

template <int W>
int check() {
  for (int count = 0; count < 60; ++count)
    for (int longest : {1, 15, 16, 40, 100, 257, 1000, 4096, 131072})
      for (int total : {longest, longest + (count - 1) * (longest / 2), longest * count}) {
        if (count == 0) total = longest = 0;
        int least = 1 << 30, best = 0;
        for (int team = 2; team <= W; ++team) {
          if (W % team) continue;
          // All warps share one item after the other, or each team the same number of the longest.
          const int teams = W / team, rounds = (count + teams - 1) / teams;
          const int time = team == W ? total / W + count * kSumTokens : rounds * (longest / team + kSumTokens);
          if (time < least || (time == least && team == W)) least = time, best = team;
        }
        const ItemSum items{count, longest, total};
        uint32_t rank = ~0u;
        for (int lane = 0; lane < 32; ++lane) rank = std::min(rank, team_rank<W>(lane, items));
        CHECK(rank_time(rank) == least);
        for (int warp = 0; warp < W; ++warp) {
          const TeamPlace place = team_place<W>(rank, warp);
          CHECK(place.warps == best || team_time<W>(place.warps, items) == least);
          CHECK(place.warps * place.teams == W);
          CHECK(place.team * place.warps + place.warp == warp);
          CHECK(place.warp < place.warps);
        }
        // What is left when all warps have as many items; only if a team is so much sooner done with one than a warp.
        const int left = left_over<W>(items), over = count % W;
        CHECK(left == 0 || (left == over && count >= W && 2 * longest <= 3 * total / count));
        if (count > 0 && total == longest * count) {
          uint32_t all = ~0u;
          for (int lane = 0; lane < 32; ++lane) all = std::min(all, team_rank<W>(lane, {over, longest, over * longest}));
          const int saved = over > 0 && count >= W ? longest - rank_time(all) : 0;
          CHECK(left == 0 || saved > kLeastLeftOver / 2);
          CHECK(left > 0 || over > W / 2 || saved <= 2 * kLeastLeftOver);
        }
        // Which items are their warps' own where all warps have one: those that are sooner done so, what is left over being
        // shared, than all of them shared by all warps. Each division may round a token off.
        if (count >= W) {
          const int rest = left > 0 ? team_time<W>(W, {left, longest, left * (total / count)}) : 0;
          const int alone = (left > 0 ? count / W : (count + W - 1) / W) * longest + rest;
          const int saved = team_time<W>(W, items) - alone, own = own_tokens<W>(rank, items, left);
          CHECK(longest <= own ? saved >= -count : saved <= count);
        }
      }
  return 0;
}

// 12 items and half of one: 333 tokens of each and a piece shared by all take 333 + 38, three teams that share all 5 * 107.
constexpr ItemSum kPiece{13, 333, 12 * 333 + 167};
static_assert(left_over<12>(kPiece) == 1 && own_tokens<12>(0, kPiece, 1) >= 333);

int main() { return check<12>() || check<8>() || check<6>() || check<4>(); }
"""


def test_teams_are_the_fastest_by_the_model(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "teams.cpp").write_text(PROGRAM)
    program = tmp_path / "teams"
    build = [compiler, "-std=c++17", "-Wall", f"-I{jit.CSRC}", str(tmp_path / "teams.cpp"), "-o", str(program)]
    subprocess.run(build, check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
