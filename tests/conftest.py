from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_pat.demo import tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-shaped model."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny-qwen3")


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Values of a parameter among the tests of the module that will run."""
    items = [item for item in request.session.items if item.path == request.node.path]
    return [item.callspec.params[parameter] for item in items if not item.get_closest_marker("skip")]
