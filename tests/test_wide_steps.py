"""Which steps are planned with wide tiles only: every limit at its edge, in both planners."""

from __future__ import annotations

import msgspec
import oracle
import pytest
from trees import IN_BINS

from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, CostModel, Node, PackConfig, WideSteps, native

pytestmark = pytest.mark.once

WORKERS, KV_HEADS = 3, 2
SMALL = WideSteps(
    small_tokens=400, small_long_draft_queries=3, small_queries=2, small_sharing=3, small_draft_tokens=100
)
LITTLE = WideSteps(little_shared_long_draft_queries=4, little_shared_draft_queries=2)
RAGGED = WideSteps(ragged_queries=4, ragged_tokens=100, ragged_draft_rows=2, ragged_rows=4)


def config(steps: WideSteps, rows: int, drafts: bool) -> PackConfig:
    """Of queries with so many rows; the smallest tile has four."""
    cost = CostModel(KV_HEADS * rows, KV_HEADS, 64, 64, 2)
    return PackConfig(cost, msgspec.structs.replace(IN_BINS, wide_steps=steps), WORKERS, drafts=drafts)


def behind(prefix: int, own: list[int]) -> Batch:
    """Requests with `own` tokens each behind a prefix that they share; the shortest of all if there is none."""
    return Batch([prefix + length for length in own], [Node(0, prefix, list(range(len(own))))] if prefix else [])


def is_wide(batch: Batch, config: PackConfig) -> bool:
    """Whether the oracle plans the batch so; the native planner has to do what it does."""
    chosen = oracle.for_batch(batch, config)
    assert chosen in (config, config.wide_only)
    plan = oracle.make_plan(batch, config)
    assert native.make_plan(batch, config) == plan
    wide = chosen != config
    assert wide == (min(item.m for item in plan.items) > config.tiles.warp_m), "else the planners could not differ"
    return wide


@pytest.mark.parametrize(
    ("steps", "rows", "drafts", "batch", "found"),
    [
        # Small decode steps: at most 2 x 3 queries times KV heads, 400 x 3 tokens times KV heads, of which each is read three times.
        pytest.param(SMALL, 4, False, behind(200, [10] * 3), False, id="sharing, 630 < 3 x 230"),
        pytest.param(SMALL, 4, False, behind(300, [0, 0, 0]), True, id="sharing, 900 = 3 x 300"),
        pytest.param(SMALL, 4, False, behind(300, [0, 0, 1]), False, id="sharing, 901 < 3 x 301"),
        pytest.param(SMALL, 4, False, behind(600, [0, 0, 0]), True, id="tokens, 1,200"),
        pytest.param(SMALL, 4, False, behind(601, [0, 0, 0]), False, id="tokens, 1,202"),
        pytest.param(SMALL, 4, False, behind(50, [0] * 4), False, id="queries, 8 > 6"),
        pytest.param(SMALL, 4, False, behind(0, [50, 50]), False, id="draft tokens, but no drafts"),
        # Small verify steps, with drafts of up to as many rows as the smallest tile, and longer ones.
        pytest.param(SMALL, 4, True, behind(0, [75, 75]), True, id="draft tokens, 300"),
        pytest.param(SMALL, 4, True, behind(0, [75, 76]), False, id="draft tokens, 302"),
        pytest.param(SMALL, 5, True, behind(0, [300, 300]), True, id="long drafts share nothing"),
        pytest.param(SMALL, 5, True, behind(10, [10] * 4), True, id="long drafts, 8 <= 9 queries"),
        pytest.param(SMALL, 5, True, behind(10, [10] * 5), False, id="long drafts, 10 > 9 queries"),
        # Verify steps that share little: what each reads for itself is at most half as much again.
        pytest.param(LITTLE, 4, True, behind(0, [900] * 3), True, id="drafts, 6 queries"),
        pytest.param(LITTLE, 4, True, behind(0, [900] * 4), False, id="drafts, 8 > 6 queries"),
        pytest.param(LITTLE, 5, True, behind(0, [900] * 6), True, id="long drafts, 12 queries"),
        pytest.param(LITTLE, 5, True, behind(0, [900] * 7), False, id="long drafts, 14 > 12 queries"),
        pytest.param(LITTLE, 5, True, behind(400, [200, 200]), True, id="1,200 = 1.5 x 800"),
        pytest.param(LITTLE, 5, True, behind(401, [200, 199]), False, id="1,201 > 1.5 x 800"),
        pytest.param(LITTLE, 5, False, behind(0, [900] * 2), False, id="no drafts"),
        # Steps of different lengths: 4 x 3 queries, of 100 tokens on average, whose shortest is shorter than three quarters of the longest.
        pytest.param(RAGGED, 4, False, behind(0, [299, 400, 400]), True, id="299 of 400"),
        pytest.param(RAGGED, 4, False, behind(0, [300, 400, 400]), False, id="300 of 400"),
        pytest.param(RAGGED, 4, False, behind(0, [50, 150]), True, id="100 on average"),
        pytest.param(RAGGED, 4, False, behind(0, [50, 149]), False, id="less than 100 on average"),
        pytest.param(RAGGED, 4, False, behind(0, [200] * 5 + [400]), True, id="ragged, 12 queries"),
        pytest.param(RAGGED, 4, False, behind(0, [200] * 6 + [400]), False, id="ragged, 14 > 12 queries"),
        pytest.param(RAGGED, 3, False, behind(0, [200, 400]), False, id="3 rows"),
        pytest.param(RAGGED, 2, True, behind(0, [200, 400]), True, id="drafts of 2 rows"),
        pytest.param(RAGGED, 1, True, behind(0, [200, 400]), False, id="drafts of 1 row"),
        pytest.param(RAGGED, 4, False, behind(150, [50, 250]), True, id="ragged, 600 < 1.5 x 450"),
        pytest.param(RAGGED, 4, False, behind(300, [0, 150, 150]), False, id="ragged, 1,200 > 1.5 x 600"),
    ],
)  # fmt: skip
def test_a_limit_holds_up_to_its_edge(steps: WideSteps, rows: int, drafts: bool, batch: Batch, found: bool) -> None:
    assert is_wide(batch, config(steps, rows, drafts)) == found
    assert not is_wide(batch, config(WideSteps(), rows, drafts)), "by default no step is"


@pytest.mark.parametrize(
    ("gpu", "tokens", "most"), [("NVIDIA H200", 2, 49), ("NVIDIA H200", 4, 132), ("NVIDIA H100", 2, 132)]
)
def test_verify_steps_that_share_nothing_on_hopper(gpu: str, tokens: int, most: int) -> None:
    """Up to eight queries times KV heads for each SM, on an H200 three where drafts have at most 8 rows."""
    spec = AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"], query_tokens=tokens)
    tiles = capabilities.tile_table("9.0a", 128, gpu)
    found = PackConfig.of(spec, tiles, workers=132)
    assert is_wide(Batch([4_096] * most), found)
    assert not is_wide(Batch([4_096] * (most + 1)), found)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100"])
def test_decode_steps_of_different_lengths_on_hopper(gpu: str) -> None:
    found = PackConfig.of(
        AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"]), capabilities.tile_table("9.0a", 128, gpu), workers=132
    )
    assert is_wide(Batch([512, 1_536] * 8), found)
    assert not is_wide(Batch([1_024] * 16), found)
    assert not is_wide(Batch([192, 574] * 8), found)
