"""Which model the demo takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_pat.demo import __main__ as demo
from sglang_pat.demo import trained_model


def taken(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Path | None:
    """The trained model that a demo finds."""
    found: list[Path | None] = []
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    monkeypatch.setattr(demo, "demo", lambda parsed: found.append(demo.model_at_hand(parsed)) or 0)
    if demo.main():
        return None
    return found[0]


def test_a_trained_model_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = ["--cache", str(tmp_path)], tmp_path / "other"
    assert taken(monkeypatch, *cache) is None
    downloaded = tmp_path / "smollm2-135m"
    downloaded.mkdir()
    (downloaded / "unfinished.safetensors").touch()
    assert taken(monkeypatch, *cache) is None
    (downloaded / "model.safetensors").touch()
    assert taken(monkeypatch, *cache) == downloaded
    other.mkdir()
    (other / "config.json").touch()
    assert taken(monkeypatch, *cache, "--model", str(other)) == other


def test_a_model_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(monkeypatch, "--model", str(tmp_path)) is None
    assert "has no config.json: name a model's folder" in capsys.readouterr().err


def test_another_file_than_the_model_s_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=r"other.gguf is another model than it was: its SHA-256 is not b179c95"):
        trained_model.write(tmp_path / "model", source=other)
    assert not (tmp_path / "model").exists()


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for sha in (None, trained_model.PACKAGES["smollm2-135m"][1]):
        if sha is not None:
            (tmp_path / "sha256").write_text(sha)
            assert trained_model.write(tmp_path, "smollm2-135m") == tmp_path
        with pytest.raises(RuntimeError, match="has another model than gemma3-270m"):
            trained_model.write(tmp_path, "gemma3-270m")
