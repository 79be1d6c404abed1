"""`sglang-pat estimate`: what it reads, the tree it sees, and the numbers that it takes from measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pat import cli
from sglang_pat.estimate import BLOCK, CHARS_PER_TOKEN, GPUS, EstimateError, batch_of, estimate, read, read_model

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "examples" / "config.json"
SYSTEM = "a system prompt. " * 64


def write(path: Path, lines: list) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def chat(question: str) -> dict:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": question}]},
    ]
    return {"custom_id": question, "url": "/v1/chat/completions", "body": {"messages": messages, "max_tokens": 7}}


def logged(text: str) -> list[dict]:
    obj = {"text": text, "input_ids": None, "sampling_params": {"max_new_tokens": 7}}
    return [{"event": "request.received", "rid": text, "obj": obj}, {"event": "request.finished", "rid": text}]


@pytest.mark.parametrize(
    "lines",
    [
        [SYSTEM + question for question in ("one", "two", "three")],
        [chat(question) for question in ("one", "two", "three")],
        [{"body": {"prompt": SYSTEM + question, "max_tokens": 7}} for question in ("one", "two", "three")],
        [row for question in ("one", "two", "three") for row in logged(SYSTEM + question)],
        [{"body": {"prompt": [*range(300), question], "max_tokens": 7}} for question in range(3)],
    ],
)
def test_shared_prefixes_are_found_in_every_format(tmp_path: Path, lines: list) -> None:
    prompts = read(write(tmp_path / "requests", lines), output=7)
    batch = batch_of(prompts)
    assert len(prompts) == 3 and {prompt.output for prompt in prompts} == {7}
    (root,) = batch.roots
    assert root.queries == [0, 1, 2] and root.start == 0 and not root.children
    assert 0.8 * min(batch.seq_lens) < root.end <= min(batch.seq_lens)


def test_a_trace_keeps_its_lengths(tmp_path: Path) -> None:
    rows = [
        {"timestamp": i, "input_length": 1500, "output_length": 100, "hash_ids": [1, 2 + i % 2, 10 + i]}
        for i in range(4)
    ]
    batch = batch_of(read(write(tmp_path / "trace.jsonl", rows), output=1))
    assert batch.seq_lens == [1550] * 4
    (root,) = batch.roots
    assert (root.end, root.queries) == (512, [0, 1, 2, 3])
    assert [(node.start, node.end, node.queries) for node in root.children] == [
        (512, 1024, [0, 2]),
        (512, 1024, [1, 3]),
    ]


def test_text_counts_four_characters_a_token(tmp_path: Path) -> None:
    (prompt,) = read(write(tmp_path / "prompts", ["x" * 1000]), output=5)
    assert prompt.tokens == 1000 // CHARS_PER_TOKEN and len(prompt.blocks) == prompt.tokens // BLOCK


def test_sharing_pays_and_nothing_shared_does_not(tmp_path: Path) -> None:
    model = read_model(CONFIG)

    def columns(prompts: list[str]) -> list[float]:
        path = write(tmp_path / "prompts", prompts)
        row = next(line for line in estimate(read(path, 100), model, "h200", [64]) if "%" in line)
        return [float(value.rstrip("%")) for value in row.split()]

    long = "the same words for everybody, " * 1000
    size, shared, whole, packed, other, attention, tpot, packed_tpot = columns([long + str(i) for i in range(64)])
    assert size == 64 and shared > 90 and packed < whole / 20
    assert attention < other / 3 and packed_tpot < tpot
    _, shared, whole, packed, *_ = columns([f"{i:02d}, " * 2000 for i in range(64)])
    assert shared == 0 and packed == whole


def test_predictions_are_those_of_the_calibration() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "estimate-h200.json").read_text())
    known = {**result["pat"], **result["flashinfer"], **{name: result[name] for name in ("rest_ms", "request_us")}}
    del known["error"]
    assert len(known) == 9
    for name, value in known.items():
        assert getattr(GPUS["h200"], name) == pytest.approx(value, rel=0.01), name


def test_weights_of_a_dense_model_are_counted(tmp_path: Path) -> None:
    assert 14e9 < (read_model(CONFIG).weight_bytes or 0) < 17e9, (
        "Qwen3-8B has 8.2 billion parameters, 0.6 of them embeddings"
    )
    config = json.loads(CONFIG.read_text())
    assert read_model(write(tmp_path / "config.json", [{**config, "num_experts": 8}])).weight_bytes is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt cannot be read"),
        ([str(CONFIG), "--model", "/nowhere"], "is not a model's config.json"),
        ([str(CONFIG), "--gpu", "abacus"], "--gpu abacus: there are measurements for h200 only"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", str(CONFIG)]
    assert cli.main(["estimate", *arguments, *model]) == 2
    assert message in capsys.readouterr().err


def test_mla_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="MLA models are not supported"):
        read_model(write(tmp_path / "config.json", [{"kv_lora_rank": 512}]))
