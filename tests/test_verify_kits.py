"""SGLang's own tests of speculative verify steps (`sglang.test.kits.attention_unittest`), against `pat`.

Draft models run on stock backends, so the kits of draft and draft extend are SGLang's own concern.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import importing_kits
from test_attention_kit import CASES, DEVICE, ON_GPU

from sglang_pat import plugin
from sglang_pat.backend.attention import PatAttnBackend
from sglang_pat.backend.start import support

with importing_kits():
    from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as kits

plugin.register()


@pytest.fixture(autouse=True)
def _drafting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kits say how long drafts are, but not that there are any. They load no plugins, and their rows end with the context."""
    for guard in ("check_guards", "check_rows"):
        monkeypatch.setattr(support, guard, lambda *_: None)
    context = type(dense.get_context())
    override = context.override_server_args
    monkeypatch.setattr(
        context, "override_server_args", lambda self, **given: override(self, **{**given, "speculative_algorithm": "EAGLE"})
    )  # fmt: skip
    with torch.no_grad():
        yield


DRAFTS = {"chains": (1, 4), "branches": (2, 3)}
"""Top k, and tokens: the kits have one tree with branches, of three."""
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def case(heads: str, page_size: int, tokens: int, lengths: tuple[int, ...]) -> Any:
    num_heads, num_kv_heads = HEADS[heads]
    return replace(
        CASES["mha_decode_page_boundary"], name="verify", num_heads=num_heads, num_kv_heads=num_kv_heads, page_size=page_size,
        prefix_lens=lengths, extend_lens=(tokens,) * len(lengths), forward_mode=ForwardMode.TARGET_VERIFY,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [(kind, drafts) for kind in ("eagle", "frozen_kv_mtp", "ngram") for drafts in DRAFTS] + [("dflash", "chains")],
)
@pytest.mark.parametrize(("heads", "page_size"), [("MHA", 1), ("GQA", 16), ("MQA", 1)])
def test_eager(kind: str, drafts: str, heads: str, page_size: int) -> None:
    topk, tokens = DRAFTS[drafts]
    verified = case(heads, page_size, tokens, (1, 15, 16, 47))
    kits.run_dense_spec_verify_case(unittest.TestCase(), verified, topk=topk, spec_kind=kind, **DEVICE)


@pytest.fixture(params=["lengths on the host", "lengths on the device only"])
def _lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap scheduling SGLang gives the host no lengths, unless a backend needs them."""
    if request.param == "lengths on the device only":
        prepare = kits._prepare_target_verify_batch

        def forget(batch: Any, *arguments: Any) -> None:
            prepare(batch, *arguments)
            batch.seq_lens_cpu = batch.seq_lens_sum = None

        monkeypatch.setattr(kits, "_prepare_target_verify_batch", forget)


def test_lengths_of_dflash() -> None:
    """Its worker puts no mask into a batch, and bounds of the lengths on the host."""
    verified = case("GQA", 1, 16, (100, 47, 200))
    fixture = dense.build_dense_attention_fixture(unittest.TestCase(), verified, max_context_len=256, **DEVICE)
    batch = fixture.forward_batch
    kits._prepare_target_verify_batch(batch, verified, DEVICE["device"])
    batch.spec_info = DFlashVerifyInput(batch.input_ids, batch.positions, draft_token_num=16)
    batch.seq_lens_cpu = batch.seq_lens.cpu() + 16
    told = []
    fixture.backend.groups.steps[0].planner.on_plan = lambda *_, seq_lens, **__: told.append(seq_lens)
    inputs = dense.dense_fixture_inputs(fixture)
    with forward_context(ForwardContext(attn_backend=fixture.backend)):
        fixture.backend.init_forward_metadata(batch)
        found = dense.run_dense_forward(fixture, batch, inputs)
    assert told == [[116, 63, 216]]
    _, masks = kits._expected_case_and_masks_for_spec_verify(
        verified, topk=1, spec_kind="dflash", device=DEVICE["device"]
    )
    expected = dense.dense_attention_reference_with_custom_mask(
        fixture.reference_module, verified, inputs["prefix_hidden"], inputs["input_hidden"], masks
    )
    torch.testing.assert_close(found, expected, atol=dense.DENSE_ATOL, rtol=dense.DENSE_RTOL)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(("heads", "page_size"), [("GQA", 64), ("MHA", 64)])
@pytest.mark.usefixtures("_lengths")
def test_cuda_graph(drafts: str, heads: str, page_size: int) -> None:
    """What a backend does for a graph, with a padded batch; on a CPU too, as the kit records none. The kit writes prefixes as if pages were in order,
    so each request has one."""
    topk, tokens = DRAFTS[drafts]
    verified = case(heads, page_size, tokens, (15, 16, 31))
    kits.run_dense_spec_verify_cuda_graph_case(unittest.TestCase(), verified, topk=topk, **DEVICE)


def test_sglang_need_not_know_lengths_on_the_host() -> None:
    """SGLang asks all backends of a server, and would wait for lengths in each step."""
    built = dense.build_dense_attention_fixture(unittest.TestCase(), case("GQA", 16, 4, (15, 16)), **DEVICE)
    # 0.5.17 does not know the arguments of the process.
    first = (
        [built.runner.server_args] if "server_args" in inspect.signature(decide_needs_cpu_seq_lens).parameters else []
    )
    assert isinstance(built.backend, PatAttnBackend)
    assert not decide_needs_cpu_seq_lens(*first, [built.backend, None])
    inner = built.backend.inner
    # `torch_native` has to know them; FA3, which prefills on a GPU, need not.
    assert decide_needs_cpu_seq_lens(*first, [built.backend, inner]) == inner.needs_cpu_seq_lens == (not ON_GPU)
