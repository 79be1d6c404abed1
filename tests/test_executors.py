"""The workspace of the GPU kernels."""

from __future__ import annotations

from types import SimpleNamespace

import emulated
import msgspec
import pytest
import torch
from kernel_cases import TOLERANCE, Case, Extended, of_latents
from oracle import make_plan

from sglang_pat.backend.executors import (
    LEAST_PIECE,
    PIECES_BYTES,
    WORKSPACE_BYTES,
    CudaExecutor,
    left_to_stock,
    piece_of,
    policy_of,
    remark,
    share_workspace,
    workspace_slots,
)
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node, PackConfig

pytestmark = pytest.mark.once

HEADS = ((32, 8), (64, 8), (16, 8), (32, 32), (8, 1), (5, 5))


def spec_and_config(heads: int, kv_heads: int, policy: str) -> tuple[AttentionSpec, PackConfig]:
    spec = AttentionSpec(heads, kv_heads, 128, 128, FORMATS["bfloat16"])
    return spec, PackConfig.of(spec, capabilities.tile_table("9.0a", 128), 132, policy)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("lengths", [[1], [131_072], [200_000, 3], [9000] * 40, [500] * 300])
def test_unpacked_plans_always_fit(heads: int, kv_heads: int, lengths: list[int]) -> None:
    """Also where a server runs no more requests than these."""
    spec, pack_config = spec_and_config(heads, kv_heads, "query")
    assert make_plan(Batch(lengths), pack_config).merged_parts <= workspace_slots(spec, pack_config, len(lengths))


@pytest.mark.parametrize(("heads", "tokens"), [(8, 1), (16, 1), (20, 4), (128, 1), (128, 4)])
@pytest.mark.parametrize("lengths", [[131_072], [200_000, 3], [9000] * 40, [500] * 300])
def test_unpacked_plans_of_latents_always_fit(heads: int, tokens: int, lengths: list[int]) -> None:
    """Whose parts are large: of 512 rows a half megabyte each."""
    spec = AttentionSpec(heads, 1, 576, 512, FORMATS["bfloat16"], query_tokens=tokens, latent=True)
    pack_config = PackConfig.of(spec, capabilities.tile_table_of(spec, "9.0a"), 132, "query")
    assert make_plan(Batch(lengths), pack_config).merged_parts <= workspace_slots(spec, pack_config, len(lengths))


@pytest.mark.parametrize(
    ("heads", "tokens", "latent", "packs"),
    [
        (16, 1, True, True), (16, 2, True, True), (20, 2, True, True), (42, 1, True, True), (43, 1, True, False), (16, 3, True, False),
        (63, 1, True, False), (16, 4, True, False), (20, 4, True, True), (83, 1, True, False), (128, 3, True, False), (64, 1, False, True),
    ],
)  # fmt: skip
def test_latents_of_which_a_tile_holds_little_more_than_one_query_are_not_packed(
    heads: int, tokens: int, latent: bool, packs: bool
) -> None:
    spec = AttentionSpec(heads, 1, 576, 512, FORMATS["bfloat16"], query_tokens=tokens, latent=latent)
    assert policy_of(spec, "9.0a", "optimal") == ("optimal" if packs else "query")
    assert remark(spec, "9.0a", "optimal") == ("" if packs else ", nothing is packed")
    assert policy_of(msgspec.structs.replace(spec, kv=FORMATS["float8_e4m3fn"]), "9.0a", "optimal") == (
        "optimal" if packs or heads * tokens in (43, 48) else "query"
    )
    assert policy_of(spec, "9.0a", "naive") == "naive", "for who wants to time it"
    assert remark(spec, "9.0a", "naive") == remark(spec, "9.0a", "query") == ""
    assert policy_of(spec, "8.9", "optimal") == ("query" if latent else "optimal"), "whose tiles have 16 rows"
    single, fp8 = msgspec.structs.replace(spec, query_tokens=1), FORMATS[capabilities.FP8["fp8_e4m3"]]
    drafted = tokens if tokens > 1 else 0
    assert left_to_stock([single], "9.0a", drafted, "optimal") == (not packs)
    assert not left_to_stock([single], "9.0a", drafted, "query")
    assert not left_to_stock([msgspec.structs.replace(single, kv=fp8)], "9.0a", drafted, "optimal"), (
        "it would be copied"
    )


@pytest.mark.parametrize("tensors", [1, 2])
def test_latents(tensors: int) -> None:
    """With Q whole, and in two tensors as SGLang's models have it: the first a view of [heads, tokens, 512]. On the host, as above."""
    case = of_latents(Case(Batch([90] * 5, [Node(0, 70, list(range(5)))]), 20, 1, 576, 512, torch.bfloat16))
    tiles = capabilities.tile_table_of(case.spec, "9.0a")
    executor = CudaExecutor.__new__(CudaExecutor)
    executor._decoder = emulated.Decoder(case.spec, tiles, "9.0a")
    executor._plan = case.plan(tiles, executor._decoder.workers, "naive")
    executor._shape = (int(executor._plan[2]), case.spec.heads, case.spec.v_head_dim)
    executor.attach(torch.full((executor.workspace_bytes,), 255, dtype=torch.uint8))  # NaN
    q, q_rope = case.q, None
    if tensors == 2:
        q, q_rope = case.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), case.q[..., 512:]
    out = executor.decode(q, case.kv, case.tables, case.scores(), q_rope)
    assert out.shape == (5, 20, 512) and case.difference(out) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_memory_is_limited(heads: int, kv_heads: int) -> None:
    spec, pack_config = spec_and_config(heads, kv_heads, "optimal")
    slots = workspace_slots(spec, pack_config, 4096)
    assert slots * heads * (128 * 2 + 4) <= WORKSPACE_BYTES < 256 << 20
    assert slots < 4096 * 8 or heads < 32, "the limit is what limits them"
    assert (slots + 1) * heads * (128 * 2 + 4) > WORKSPACE_BYTES or slots >= 8 * 4096
    assert slots >= 2 * 4096 or heads > 32, "a prefix and a tail for every request"


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("requests", "context"), [(1, 100), (256, 40_960), (256, 131_072), (4096, 131_072)])
def test_with_pieces_every_batch_fits(heads: int, kv_heads: int, requests: int, context: int) -> None:
    spec = AttentionSpec(heads, kv_heads, 128, 128, FORMATS["bfloat16"])
    table = SimpleNamespace(size=requests, req_to_token=torch.empty(requests, context, device="meta"))
    piece = piece_of(SimpleNamespace(req_to_token_pool=table), [spec, msgspec.structs.replace(spec, query_tokens=4)])
    tiles = capabilities.batch_invariant(capabilities.tile_table("9.0a", 128))
    config = PackConfig.of(spec, tiles, 132, piece=piece)
    needed, part = requests * -(-context // piece), heads * (128 * 2 + 4)
    assert workspace_slots(spec, config, requests, context) == max(needed, WORKSPACE_BYTES // part)
    assert needed * 4 * part <= PIECES_BYTES
    assert piece == LEAST_PIECE or 2 * needed * 4 * part > PIECES_BYTES // 2, "no longer than it must be"


def test_v_may_be_narrower_than_k() -> None:
    """The output has V's dimension, and parts are kept in as little memory. On the host, where `__init__` finds no GPU."""
    case = Case(Batch([90] * 5, [Node(0, 70, list(range(5)))]), 4, 2, 192, 128, torch.bfloat16)
    tiles = capabilities.tile_table("9.0a", 192)
    executor = CudaExecutor.__new__(CudaExecutor)
    executor._decoder = emulated.Decoder(case.spec, tiles, "9.0a")
    executor._plan = case.plan(tiles, executor._decoder.workers, "naive")
    executor._shape = (int(executor._plan[2]), case.spec.heads, case.spec.v_head_dim)
    assert executor._shape[0] > 0, "some parts are merged"
    executor.attach(torch.full((executor.workspace_bytes,), 255, dtype=torch.uint8))  # NaN
    out = executor.decode(case.q, case.kv, case.tables, case.scores())
    assert case.difference(out) < TOLERANCE[torch.bfloat16]


def test_verify_steps_and_single_tokens_share_a_workspace() -> None:
    shapes = (7, 32, 128), (28, 8, 64)
    made = [CudaExecutor.__new__(CudaExecutor) for _ in shapes]
    for executor, shape in zip(made, shapes, strict=True):
        executor._shape, executor._plan = shape, torch.zeros(1)
    share_workspace(made)
    for executor, shape in zip(made, shapes, strict=True):
        assert executor._partial.shape == shape and executor._lse.shape == shape[:2]
    assert len({executor._partial.untyped_storage().data_ptr() for executor in made}) == 1
    share_workspace([])


@pytest.mark.parametrize("window", [0, 40])
def test_extends_run_by_their_own_module_in_the_same_workspace(window: int) -> None:
    batch = Batch([90] * 5, [Node(0, 70, list(range(5)))])
    case = Extended(batch, [3, 1, 2, 5, 1], 4, 2, 128, 128, torch.bfloat16, window)
    tiles = capabilities.tile_table("9.0a", 128)
    executor = CudaExecutor.__new__(CudaExecutor)
    executor._extender = emulated.Decoder(case.spec, tiles, "9.0a", limits=True)
    plan = case.plan(tiles, executor._extender.workers)
    executor._shape = (int(plan[2]), case.spec.heads, case.spec.v_head_dim)
    executor.attach(torch.full((executor.workspace_bytes,), 255, dtype=torch.uint8))  # NaN
    out = executor.extend(case.q, case.kv, case.tables, case.scores(), plan)
    assert case.shared > 0 and case.difference(out) < TOLERANCE[torch.bfloat16]
