"""`sglang-pat estimate`: what it reads, the tree it sees, and the numbers that it takes from measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_top import JUNK, sentence

from sglang_pat import cli
from sglang_pat import estimate as module
from sglang_pat.estimate import (
    BLOCK,
    CHARS_PER_TOKEN,
    GPUS,
    GPUS_8BIT,
    EstimateError,
    batch_of,
    estimate,
    read,
    read_model,
)

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "examples" / "config.json"
PROMPTS = ROOT / "docs" / "examples" / "prompts.txt"
SYSTEM = "a system prompt. " * 64


def write(path: Path, lines: list) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


STAMP = "[2026-11-22 23:22:15] "
"""In front of what SGLang logs."""


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
        [{"prompt": [[*range(300), question] for question in range(3)], "max_completion_tokens": 7, "max_tokens": 9}],
        [{"prompt": [SYSTEM + question for question in ("one", "two", "three")], "max_tokens": None}],
        [{"text": [SYSTEM, SYSTEM, SYSTEM], "sampling_params": [{"max_new_tokens": None}, {}, {"max_new_tokens": 7}]}],
        [{"input_ids": [list(range(300))] * 3, "text": None, "sampling_params": {"max_new_tokens": 7}}],
        [{"event": "request.received", "obj": {"text": [SYSTEM] * 3, "sampling_params": [{"max_new_tokens": 7}] * 3}}],
        ["", *(json.dumps(chat("x")) + "\r" for _ in range(3)), "  "],
        [
            "\ufeff" + json.dumps(chat("one")),
            json.dumps(chat("two \u2028 \x85 lines")),
            chat("half \ud83d a character"),
        ],
        ["INFO: started", *(STAMP + json.dumps(row) for row in logged(SYSTEM) * 3), STAMP + "Decode batch, {}"],
    ],
)
def test_shared_prefixes_are_found_in_every_format(tmp_path: Path, lines: list) -> None:
    prompts = read(write(tmp_path / "requests", lines), output=7)
    batch = batch_of(prompts)
    assert len(prompts) == 3 and {prompt.output for prompt in prompts} == {7}
    (root,) = batch.roots
    assert root.queries == [0, 1, 2] and root.start == 0 and not root.children
    assert 0.8 * min(batch.seq_lens) < root.end <= min(batch.seq_lens)


def test_a_log_that_sglang_writes_is_read(tmp_path: Path) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.utils.request_logger import RequestLogger

    requests = [
        GenerateReqInput(text=[SYSTEM * 9 + "one", SYSTEM * 9 + "two"], sampling_params={"max_new_tokens": 7}),
        GenerateReqInput(input_ids=list(range(3000)), sampling_params={"max_new_tokens": 9}),
    ]
    for level in (1, 2, 3):
        log = RequestLogger(True, level, "json", [str(tmp_path / str(level))])
        for request in requests:
            request.normalize_batch_and_arguments()
            log.log_received_request(request)
            log.log_finished_request(request, {"meta_info": {}, "text": "an answer"})
        log.log_openai_received_request({"messages": [{"role": "user", "content": "the same again"}]})
    paths = [next((tmp_path / str(level)).iterdir()) for level in (1, 2, 3)]
    prompts = read(paths[2], output=1)
    assert [(prompt.tokens, prompt.output) for prompt in prompts] == [
        (len(SYSTEM * 9 + "one") // CHARS_PER_TOKEN, 7),
        (len(SYSTEM * 9 + "two") // CHARS_PER_TOKEN, 7),
        (3000, 9),
    ]
    for path in paths[:2]:
        with pytest.raises(EstimateError, match=r"line 1: .* SGLang logs whole prompts with --log-requests-level 3"):
            read(path, output=1)
    RequestLogger(True, 3, "text", [str(tmp_path / "text")]).log_received_request(requests[0])
    with pytest.raises(EstimateError, match="is a log in text: SGLang writes JSON with --log-requests-format json"):
        read(next((tmp_path / "text").iterdir()), output=1)


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("row", "tokens", "output"),
    [
        ({"prompt": "", "max_tokens": 0}, 1, 0),
        ({"prompt": [7] * 40, "max_tokens": None}, 40, 5),
        ({"messages": [{"role": "user", "content": None}, {"role": "tool"}], "max_completion_tokens": 3}, 4, 3),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"text": None}]}]}, 2, 5),
        ({"messages": MESSAGES, "tools": None}, 4, 5),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "find"}}]}, 16, 5),
        ({"messages": MESSAGES, "temperature": float("nan"), "seed": 10**400, "metadata": {"a": [{}]}}, 3, 5),
        ({"hash_ids": [-1, 2**70], "input_length": 513, "output_length": 0}, 513, 0),
        ({"hash_ids": [], "input_length": 2**31 - 1, "output_length": None, "timestamp": "?"}, 2**31 - 1, 5),
    ],
)
def test_what_a_request_may_say(tmp_path: Path, row: dict, tokens: int, output: int) -> None:
    (prompt,) = read(write(tmp_path / "requests", [row]), output=5)
    assert (prompt.tokens, prompt.output) == (tokens, output)


def test_text_may_look_like_json(tmp_path: Path) -> None:
    prompts = ["{{user}} asks:", '{"a": 1} is what?', "[INST] [1, 2]", "}", STAMP, "null", "  spaces"]
    found = read(write(tmp_path / "prompts", prompts), output=5)
    assert [prompt.tokens for prompt in found] == [max(1, len(prompt) // CHARS_PER_TOKEN) for prompt in prompts]


GOOD = {"prompt": "hello", "max_tokens": 5}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "max_tokens": -1}, "Expected `int` >= 0 - at `$.max_tokens`"),
        ({"prompt": "x", "max_tokens": "7"}, "Expected `int | null`, got `str` - at `$.max_tokens`"),
        ({"prompt": "x", "max_tokens": 7.5}, "Expected `int | null`, got `float` - at `$.max_tokens`"),
        ({"prompt": "x", "max_tokens": True}, "got `bool` - at `$.max_tokens`"),
        ({"prompt": "x", "max_completion_tokens": 10**30}, "Expected `int` <= 2147483647"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "at `$.sampling_params.max_new_tokens`"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "2 prompts and 1 sampling_params"),
        ({"text": "x", "sampling_params": []}, "1 prompts and 0 sampling_params"),
        ({"prompt": 7}, "at `$.prompt`"),
        ({"prompt": {}}, "at `$.prompt`"),
        ({"prompt": []}, "a prompt must be a text, or tokens and nothing else"),
        ({"prompt": [1, 2, "..."]}, "a prompt must be a text, or tokens and nothing else"),
        ({"prompt": ["a", None]}, "at `$.prompt[1]`"),
        ({"prompt": [[1, "a"]]}, "at `$.prompt[0][1]`"),
        ({"prompt": [-5]}, "Expected `int` >= 0 - at `$.prompt[0]`"),
        ({"prompt": [1.5]}, "at `$.prompt[0]`"),
        ({"prompt": [True]}, "at `$.prompt[0]`"),
        ({"messages": []}, "no prompt, messages, text or input_ids"),
        ({"messages": "hello"}, "at `$.messages`"),
        ({"messages": [None]}, "at `$.messages[0]`"),
        ({"messages": [{"content": "x"}]}, "Object missing required field `role` - at `$.messages[0]`"),
        ({"messages": [{"role": 1, "content": "x"}]}, "at `$.messages[0].role`"),
        ({"messages": [{"role": "user", "content": 7}]}, "at `$.messages[0].content`"),
        ({"messages": [{"role": "user", "content": {}}]}, "at `$.messages[0].content`"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "at `$.messages[0].content[0]`"),
        ({"messages": [{"role": "user", "content": [{"text": 7}]}]}, "at `$.messages[0].content[0].text`"),
        ({"body": None}, "Expected `object`, got `null`"),
        ({"body": [1]}, "Expected `object`, got `array`"),
        ({"input": "to embed"}, "no prompt, messages, text or input_ids"),
        ({}, "no prompt, messages, text or input_ids"),
        ({"event": "request.received"}, "Expected `object`, got `null`"),
        ({"event": "request.received", "obj": {"text": "x" * 1024 + "..." + "y" * 1024}}, "a part of a prompt"),
        ({"hash_ids": ["a"], "input_length": 600}, "at `$.hash_ids[0]`"),
        ({"hash_ids": None, "input_length": 600}, "at `$.hash_ids`"),
        ({"hash_ids": [1]}, "Object missing required field `input_length`"),
        ({"hash_ids": [1], "input_length": -600}, "Expected `int` >= 0 - at `$.input_length`"),
        ({"hash_ids": [1], "input_length": 10**18}, "at `$.input_length`"),
        ({"hash_ids": [1], "input_length": 600, "output_length": "7"}, "at `$.output_length`"),
        ("[1, 2]", "no whole JSON object"),
        ('"text"', "no whole JSON object"),
        ("null", "no whole JSON object"),
        ("7", "no whole JSON object"),
        ("plain text", "no whole JSON object"),
        ('{"prompt": "cut o', "no whole JSON object"),
        ('{"seed": ' + "1" * 5000 + "}", "no whole JSON object"),
        ('{"a": ' + "[" * 10**5, "maximum recursion depth exceeded"),
        ('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", "maximum recursion depth exceeded"),
    ],
)
def test_a_bad_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "requests", [GOOD, "", row, GOOD])
    found = sentence(capsys, "estimate", str(path), "--model", str(CONFIG))
    assert f"{path}, line 3: " in found and message in found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no request: give an OpenAI batch, a request log, a trace, or prompts"),
        (b" \n\r\n\n", "has no request"),
        (b'{"event": "request.finished"}\n{"event": 7}\n', "has no request"),
        (b"\x1f\x8b\x08\x00\x00\n", ", line 1: no UTF-8"),
        (b"one\ntwo\n\xe9\n", ", line 3: no UTF-8"),
        ("one\ntwo".encode("utf-16"), ", line 1: no UTF-8"),
        (b"one\ntwo\x00\n", ", line 2: no text, but zero bytes"),
        (b"x" * 2000, ", line 1: more than 0 MiB"),
        (b'{\n  "prompt": 1\n}\n', ", line 1: no whole JSON object"),
        (b'[\n  {"prompt": 1}\n]\n', ", line 1: no whole JSON object"),
        (b'[{"prompt": "x"}]', ", line 1: no whole JSON object"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_has_no_requests_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "requests"
    monkeypatch.setattr(module, "LONGEST", 1000)
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)
    found = sentence(capsys, "estimate", str(path), "--model", str(CONFIG))
    assert f"{path}{message}" in found or f"{path} {message}" in found


def changed(**changes: Any) -> dict:
    """The example's config.json; None takes something out."""
    config = {**json.loads(CONFIG.read_text()), **changes}
    return {name: value for name, value in config.items() if value is not None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "(Expected `object`, got `array`)"),
        (7, "(Expected `object`, got `int`)"),
        ({}, "(Object missing required field `num_attention_heads`)"),
        ({"text_config": [1]}, "(Expected `object`, got `array`)"),
        ({"text_config": {"hidden_size": 4}}, "(Object missing required field `num_attention_heads`)"),
        (changed(num_attention_heads=0), "(Expected `int` >= 1 - at `$.num_attention_heads`)"),
        (changed(num_attention_heads=[32]), "got `array` - at `$.num_attention_heads`)"),
        (changed(num_attention_heads="32"), "got `str` - at `$.num_attention_heads`)"),
        (changed(num_attention_heads=10**9), "(Expected `int` <= 4096 - at `$.num_attention_heads`)"),
        (changed(num_key_value_heads=0), "(Expected `int` >= 1 - at `$.num_key_value_heads`)"),
        (changed(num_key_value_heads=-8), "at `$.num_key_value_heads`)"),
        (changed(head_dim=0), "(Expected `int` >= 1 - at `$.head_dim`)"),
        (changed(head_dim=128.5), "at `$.head_dim`)"),
        (changed(hidden_size=-4096), "at `$.hidden_size`)"),
        (changed(intermediate_size=None), "(Object missing required field `intermediate_size`)"),
        (changed(vocab_size={}), "at `$.vocab_size`)"),
        (changed(num_hidden_layers=True), "at `$.num_hidden_layers`)"),
        (changed(num_key_value_heads=5), ": 32 attention heads cannot share 5 KV heads evenly"),
        (changed(head_dim=None, hidden_size=4097), ": a hidden size of 4097 is no multiple of 32 heads"),
        (
            changed(head_dim=80),
            "there are no kernels for a head dimension of 80 on a GPU (64, 96, 128, 192, 256 for both K and V are, and 192 for K with 128 "
            "for V)",
        ),
        (
            changed(layer_types=["sliding_attention", "full_attention"]),
            "layers with a sliding window cannot be estimated yet",
        ),
        (changed(model_type="gemma2"), "layers with a sliding window cannot be estimated yet"),
        (changed(hybrid_layer_pattern=[0, 1, 1]), "layers with a sliding window cannot be estimated yet"),
        (changed(full_attention_interval=4), "hybrid models, of which some layers have no KV, cannot be estimated yet"),
        (changed(layer_types=["linear_attention"]), "hybrid models, of which some layers have no KV"),
        (changed(head_dim=192, v_head_dim=128), "K and V of unequal dimensions cannot be estimated yet"),
        (changed(kv_lora_rank=512), ": MLA models are not supported by --attention-backend pat"),
        ("{", "(no JSON)"),
        ("", "(no JSON)"),
        ("[" * 10**5, "(no JSON)"),
        (b"\xff\x00\xff", "(no JSON)"),
    ],
)
def test_a_config_that_no_model_has_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Any, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(
        config if isinstance(config, bytes) else (config if isinstance(config, str) else json.dumps(config)).encode()
    )
    for given_path in (path, tmp_path):
        found = sentence(capsys, "estimate", str(PROMPTS), "--model", str(given_path))
        assert message in found and (str(path) in found or "head dimension" in found)


@pytest.mark.parametrize(
    "config",
    [
        changed(head_dim=None),
        {"text_config": changed(), "vision_config": {}},
        {"text_config": None, **changed()},
        {**changed(), "kv_lora_rank": None, "head_dim": None, "time_step_limit": [0.0, float("inf")]},
    ],
)
def test_what_a_config_may_say(tmp_path: Path, config: dict) -> None:
    model = read_model(write(tmp_path / "config.json", [config]))
    assert (model.heads, model.kv_heads, model.head_dim, model.layers) == (32, 8, 128, 36)
    assert read_model(write(tmp_path / "mha.json", [changed(num_key_value_heads=None)])).kv_heads == 32


def test_conversations_may_be_long(tmp_path: Path) -> None:
    """Each turn has all before it in front: the tree is as deep as the file is long."""
    text = "".join(f"{turn:0{BLOCK * CHARS_PER_TOKEN}d}" for turn in range(1200))
    size = BLOCK * CHARS_PER_TOKEN
    path = write(tmp_path / "turns", [{"prompt": text[: size * (turn + 1)]} for turn in range(1200)])
    (row,) = [line for line in estimate(read(path, 5), read_model(CONFIG), "h200", [1200]) if "%" in line]
    assert row.split()[:2] == ["1200", "100%"]


TOKENS = st.integers(-1, 2**31)
TEXT = st.text(max_size=200) | st.lists(st.integers(-1, 2**40), max_size=40) | JUNK
MESSAGE = st.fixed_dictionaries(
    {"role": st.just("user"), "content": TEXT | st.lists(st.fixed_dictionaries({"text": TEXT}))}
)
FIELDS = {
    "prompt": TEXT | st.lists(TEXT, max_size=3), "text": TEXT, "input_ids": TEXT, "messages": st.lists(MESSAGE) | JUNK,
    "tools": JUNK, "max_tokens": TOKENS | JUNK, "sampling_params": st.fixed_dictionaries({"max_new_tokens": TOKENS}) | JUNK,
    "event": st.sampled_from(["request.received", "request.finished"]) | JUNK, "obj": JUNK, "body": JUNK,
}  # fmt: skip
HASHED = {"hash_ids": st.lists(st.integers()), "input_length": TOKENS, "output_length": TOKENS}
ROWS = JUNK | st.fixed_dictionaries({}, optional=FIELDS) | st.fixed_dictionaries(HASHED) | st.just(GOOD)
HEADS = st.integers(-1, 70) | st.sampled_from([128, 4096]) | JUNK
CONFIGS = st.builds(
    lambda changes: changed(**changes),
    st.fixed_dictionaries({}, optional={
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": st.sampled_from([64, 128, 256]) | JUNK,
        "hidden_size": HEADS, "num_hidden_layers": HEADS, "text_config": JUNK, "num_experts": JUNK, "vocab_size": HEADS,
    }),
)  # fmt: skip


@given(st.lists(ROWS, min_size=1, max_size=6), CONFIGS | JUNK, st.integers(1, 2**31))
@settings(max_examples=400, deadline=None)
def test_an_estimate_is_made_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, rows: list, config: Any, size: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    model = None
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = read_model(folder)
    except EstimateError:
        pass
    for lines in [rows, *([row] for row in rows)]:
        try:
            prompts = read(write(folder / "requests", lines), output=5)
            shown = estimate(prompts, model or read_model(CONFIG), "h200", [size])
        except EstimateError:
            continue
        assert f"{len(prompts):,} requests, " in shown[0]


def test_a_request_that_no_server_takes_is_one_sentence(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 2**31 - 1, "output_length": 0, "hash_ids": []}
    prompts = read(write(tmp_path / "requests", [row]), output=5)
    with pytest.raises(EstimateError, match="no server takes such a batch: a request's tokens must be 0 to"):
        estimate(prompts, read_model(CONFIG), "h200", [1])


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


def test_an_fp8_cache_is_half_of_one_of_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    def columns(*flags: str) -> list[float]:
        assert cli.main(["estimate", str(PROMPTS), "--model", str(CONFIG), "--batch", "8", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(("float8" in line) == bool(flags) for line in lines if line.startswith("Assumed"))
        return [float(word.rstrip("%")) for word in next(line for line in lines if "%" in line).split()[:6]]

    plain, small = columns(), columns("--kv-cache-dtype", "fp8_e4m3")
    assert columns("--kv-cache-dtype", "fp8_e5m2") == small
    assert small[:2] == plain[:2]
    assert small[2] == pytest.approx(plain[2] / 2, abs=0.011), "KV, rounded"
    # Plans are others: reading again is cheaper.
    assert plain[3] / 2 - 0.011 < small[3] < 0.7 * plain[3]
    # Times have coefficients of their own (`GPUS_8BIT`): so few tokens take as long as a launch.
    assert small[5] <= plain[5] + 1


def test_predictions_are_those_of_the_calibration() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "estimate-h200.json").read_text())
    rest = {name: result[name] for name in ("rest_ms", "request_us")}
    for gpu, found in ((GPUS["h200"], result), (GPUS_8BIT["h200"], result["fp8"])):
        known = {**found["pat"], **found["flashinfer"], **rest}
        del known["error"]
        assert len(known) == 9
        for name, value in known.items():
            assert getattr(gpu, name) == pytest.approx(value, rel=0.01), name


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
        ([str(PROMPTS), "--model", "/nowhere"], "is not a model's config.json"),
        ([str(PROMPTS), "--gpu", "abacus"], "--gpu abacus: there are measurements for h200 only"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", str(CONFIG)]
    assert cli.main(["estimate", *arguments, *model]) == 2
    assert message in capsys.readouterr().err


def test_mla_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="MLA models are not supported"):
        read_model(write(tmp_path / "config.json", [{"kv_lora_rank": 512}]))
