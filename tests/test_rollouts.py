"""benchmarks/rollouts.py, with a tiny model and a few samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import rollouts

ON_CPU = [] if torch.cuda.is_available() else ["--server=--device=cpu", "--server=--dtype=float32"]


@pytest.mark.server
@pytest.mark.slow
def test_samples_share_prompts_and_turns(model: Path, gpu_model: Path, tmp_path: Path) -> None:
    arguments = "--settings pat --shapes 2x3 1x8 --prompt 600 900 --answer 4 12 --turns 1+2 --message 9 --server=--max-total-tokens=30000"
    output = tmp_path / "rollouts.json"
    command = [sys.executable, ROOT / "benchmarks" / "rollouts.py", *arguments.split(), *ON_CPU, "--output", output]
    done = subprocess.run(
        [*command, "--model", model if ON_CPU else gpu_model], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    records = json.loads(output.read_text())["records"]
    assert [(record["shape"], record["turns"], record["deterministic"]) for record in records] == [
        ("2x3", "1+2", False),
        ("1x8", "1+2", False),
    ]
    # A prompt's first turn, and the first one of its samples, find nothing; all others the conversation up to there.
    turns = [1 + 2 * 3, 1 + 2 * 8]
    for record, count in zip(records, turns, strict=True):
        assert (count - 1) / count - 0.1 < record["cached"] < 1
        assert 0.8 < record["prompt_share"] < 1 and 0 <= record["tail"] < 1
        assert record["output_tps"] == pytest.approx(record["answers"] / record["seconds"], rel=0.1)
    assert records[0]["answers"] >= 4 * 2 * turns[0] and records[1]["answers"] >= 4 * turns[1]


@pytest.mark.parametrize(
    "wrong",
    ["--shapes 0x4", "--shapes 2x", "--turns 1+0", "--turns 1", "--prompt 5 3", "--answer 0 5", "--message -3", "--settings pat/fast"],
)  # fmt: skip
def test_wrong_options_are_found_before_a_model_is_loaded(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rollouts.json"
    monkeypatch.setattr(sys, "argv", ["rollouts.py", f"--model={tmp_path}", f"--output={output}", *wrong.split()])
    with pytest.raises(SystemExit, match="2"):
        rollouts.main()
    assert f"error: {wrong.split(maxsplit=1)[0]}: " in capsys.readouterr().err and not output.exists()
