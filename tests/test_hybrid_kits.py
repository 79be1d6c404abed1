"""SGLang's own tests of layers that keep states (`sglang.test.kits.attention_unittest`), with `pat` for the attention beside them."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import importing_kits

from sglang_pat import compat, plugin

pytestmark = pytest.mark.gpu  # SGLang's kernels for states need one

if torch.cuda.is_available():
    with importing_kits():
        from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as gdn
        from sglang.test.kits.attention_unittest.attention_methods import mamba2_attention as mamba2
        from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs

    plugin.register()

    HEAD_DIM = 64  # the kits' own are less than our kernels take
    GDN_DIMS: dict[str, Any] = {"head_k_dim": HEAD_DIM, "head_v_dim": HEAD_DIM}
    GDN = {case.name: case for case in gdn.make_gdn_cases("pat")}
    MAMBA2 = {case.name: replace(case, head_dim=HEAD_DIM) for case in mamba2.make_mamba2_cases("pat")}
else:
    GDN = MAMBA2 = {}


@pytest.fixture(autouse=True)
def _no_grad(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pools are written in place. FA3 asks the kits' runners for more than they have."""
    monkeypatch.setattr(compat.stock, "prefill_backend", lambda *_: "triton")
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", GDN)
def test_gated_delta_nets(name: str) -> None:
    gdn.run_gdn_attention_case(unittest.TestCase(), GDN[name], **GDN_DIMS)


@pytest.mark.parametrize("name", [name for name, case in GDN.items() if case.forward_mode.is_decode()])
def test_gated_delta_nets_in_cuda_graphs(name: str) -> None:
    case = GDN[name]
    graphs.run_gdn_cuda_graph_decode_case(
        unittest.TestCase(), case, cuda_graph_capture_batch_size=case.batch_size, **GDN_DIMS
    )


@pytest.mark.parametrize("name", MAMBA2)
def test_mamba2(name: str) -> None:
    mamba2.run_mamba2_attention_case(unittest.TestCase(), MAMBA2[name])


@pytest.mark.parametrize("name", [name for name, case in MAMBA2.items() if case.forward_mode.is_decode()])
def test_mamba2_in_cuda_graphs(name: str) -> None:
    case = MAMBA2[name]
    graphs.run_mamba2_cuda_graph_decode_case(unittest.TestCase(), case, cuda_graph_capture_batch_size=case.batch_size)
