"""Folders with the shape of real models (benchmarks/shapes.py): SGLang's libraries read them, and a word is a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "shapes.py"
sys.path.append(str(SCRIPT.parent))

from shapes import IDS_ONLY


def run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *names], cwd=folder, capture_output=True, text=True, check=False)


def test_a_word_is_a_token_and_configurations_load(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    names = run(tmp_path, *[]).stdout.split()
    assert {"qwen3-8b", "gpt-oss-20b"} <= set(names)
    assert run(tmp_path, *names).stdout.split() == names
    for name in names:
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert config.num_attention_heads % config.num_key_value_heads == 0
        if name in IDS_ONLY:
            continue
        tokens = [5, 9, 777, 19_999, 3]
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.encode(tokenizer.decode(tokens)) == tokens
        assert max(tokenizer.get_vocab().values()) < config.vocab_size


def test_an_unknown_shape_is_refused_in_one_sentence(tmp_path: Path) -> None:
    result = run(tmp_path, "qwen3-8b", "../qwen3")
    assert result.returncode == 2 and "../qwen3 is none of qwen3-8b" in result.stderr
    assert not list(tmp_path.iterdir())
