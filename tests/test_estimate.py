"""`sglang-pat estimate`: what it reads, the tree it sees, and the numbers that it takes from measurements."""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_top import JUNK, sentence

from sglang_pat import cli, model_config
from sglang_pat.cli import parser
from sglang_pat.estimate import EstimateError, costs, estimate, load, models, read_model
from sglang_pat.estimate.costs import GPUS
from sglang_pat.estimate.prompts import BLOCK, CHARS_PER_TOKEN, TRACE_BLOCK, Prompt, batch_of
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "examples" / "config.json"
PROMPTS = ROOT / "docs" / "examples" / "prompts.txt"
SYSTEM = "a system prompt. " * 64


def read(path: Path, output: int) -> list[Prompt]:
    return load(path, output).prompts


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
        [
            f"\ufeff{json.dumps(chat('one'))}",
            "\ufeff" + json.dumps(chat("two")),
            "\ufeff",
            "\ufeff\ufeff" + json.dumps(chat("x")),
        ],
        [{"body": {"prompt": [*map(float, range(300)), question], "max_tokens": 7.0}} for question in range(3)],
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
CALLS = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": json.dumps({"plan": "stop" * 990})}}]


@pytest.mark.parametrize(
    ("row", "tokens", "output"),
    [
        ({"prompt": "", "max_tokens": 0}, 1, 0),
        ({"prompt": [7] * 40, "max_tokens": None}, 40, 5),
        ({"messages": [{"role": "user", "content": None}, {"role": "tool"}], "max_completion_tokens": 3}, 4, 3),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"text": None}]}]}, 2, 5),
        ({"messages": MESSAGES, "tools": None}, 4, 5),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "find"}}]}, 16, 5),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": CALLS}]}, 1017, 5),
        ({"messages": [{"role": "assistant", "content": "x" * 39, "reasoning_content": "y" * 400}]}, 113, 5),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "y" * 400}]}]}, 103, 5),
        ({"messages": MESSAGES, "temperature": float("nan"), "seed": 10**400, "metadata": {"a": [{}]}}, 3, 5),
        ({"hash_ids": [-1, 2**70], "input_length": 513, "output_length": 0}, 513, 0),
        ({"hash_ids": [1, 2], "input_length": 1024.0, "output_length": 20.0}, 1024, 20),
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


@pytest.mark.parametrize(
    ("lines", "name", "source"),
    [
        (["one", "two"], "prompts.txt", "2 prompts, plain text, one a line, from prompts.txt"),
        (["a,b"], "x.csv", "1 prompt, plain text, one a line, with quotes and commas as a part of it, from x.csv"),
        (['"a"', '"b"'], "x", "2 prompts, plain text, one a line, with quotes and commas as a part of it, from x"),
        ([chat("a"), chat("b")], "x", "2 requests, an OpenAI batch, from x"),
        ([{"prompt": "a"}], "x", "1 request, JSON, one object a line, from x"),
        ([{"hash_ids": [1, 2], "input_length": 1024}], "x", "1 request, a trace with blocks of 512 tokens, from x"),
        (
            ["INFO", *(STAMP + json.dumps(row) for row in logged("a"))],
            "x",
            "1 request, a request log of SGLang, from x",
        ),
    ],
)
def test_it_says_what_it_took_the_file_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: list, name: str, source: str
) -> None:
    path = write(tmp_path / name, lines)
    assert cli.main(["estimate", str(path), "--model", str(CONFIG)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == source


def test_json_behind_plain_text_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path / "x", ["# my requests", "{name} asks", {"prompt": "a"}, {"prompt": "b"}])
    assert cli.main(["estimate", str(path), "--model", str(CONFIG)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1].startswith("warning: line 3 begins like JSON, but the first line is plain text") and len(lines[2]) > 9
    )
    assert [line for line in lines if line.startswith("warning")] == lines[1:2]


GOOD = {"prompt": "hello", "max_tokens": 5}
KNOWN_KEYS = "known are prompt, messages, text, input_ids, hash_ids, turns (docs/estimate.md)\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "max_tokens": -1}, ": max_tokens must be a whole number of 0 or more\n"),
        ({"prompt": "x", "max_tokens": "7"}, ": max_tokens must be a whole number, not a text\n"),
        ({"prompt": "x", "max_tokens": 7.5}, ": max_tokens must be a whole number, not a fraction"),
        ({"prompt": "x", "max_tokens": True}, ": max_tokens must be a whole number, not true or false"),
        (
            {"prompt": "x", "max_completion_tokens": 10**30},
            ": max_completion_tokens must be a whole number of 2,147,483,647 or less",
        ),
        (
            {"text": "x", "sampling_params": {"max_new_tokens": -1}},
            ": sampling_params.max_new_tokens must be a whole number of 0 or more",
        ),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "2 prompts and 1 sampling_params"),
        ({"text": "x", "sampling_params": []}, "1 prompts and 0 sampling_params"),
        ({"prompt": 7}, ": prompt must be a text or a list, not a whole number"),
        ({"body": {"prompt": {}}}, ": body.prompt must be a text or a list, not an object"),
        ({"prompt": []}, "a prompt must be a text, or tokens and nothing else"),
        ({"prompt": [1, 2, "..."]}, "a prompt must be a text, or tokens and nothing else"),
        ({"prompt": ["a", None]}, ": prompt[1] must be "),
        ({"prompt": [[1, "a"]]}, ": prompt[0][1] must be a whole number, not a text"),
        ({"prompt": [-5]}, ": prompt[0] must be a whole number of 0 or more"),
        ({"prompt": [1.5]}, ": prompt[0] must be "),
        ({"prompt": [True]}, ": prompt[0] must be "),
        ({"messages": []}, ": its messages is empty, and there is no other prompt"),
        ({"messages": "hello"}, ": messages must be a list, not a text\n"),
        ({"messages": [None]}, ": messages[0] must be an object, not null"),
        ({"messages": [{"content": "x"}]}, ": messages[0] has no role"),
        ({"messages": [{"role": 1, "content": "x"}]}, ": messages[0].role must be a text, not a whole number"),
        ({"messages": [{"role": "user", "content": 7}]}, ": messages[0].content must be a text or a list, not a"),
        ({"messages": [{"role": "user", "content": {}}]}, ": messages[0].content must be a text or a list, not a"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, ": messages[0].content[0] must be an object, not a text"),
        (
            {"messages": [{"role": "user", "content": [{"text": 7}]}]},
            ": messages[0].content[0].text must be a text, not a whole number",
        ),
        ({"body": None}, ": body must be an object, not null"),
        ({"body": [1]}, ": body must be an object, not a list"),
        ({"input": "to embed"}, f": it has the keys input; {KNOWN_KEYS}"),
        (
            {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "to embed"}},
            f": it has the keys custom_id, url, body.input; {KNOWN_KEYS}",
        ),
        ({f"k{i}": i for i in range(10)}, f": it has the keys k0, k1, k2, k3, k4, k5, k6, k7 and 2 more; {KNOWN_KEYS}"),
        ({}, f": it has no keys; {KNOWN_KEYS}"),
        ({"event": "request.received"}, ": obj must be an object, not null"),
        ({"event": "request.received", "obj": {"text": "x" * 1024 + "..." + "y" * 1024}}, "a part of a prompt"),
        ({"hash_ids": ["a"], "input_length": 600}, ": hash_ids[0] must be a whole number, not a text"),
        ({"hash_ids": None, "input_length": 600}, ": hash_ids must be a list, not null"),
        ({"hash_ids": [1]}, ": it has no input_length"),
        ({"hash_ids": [1], "input_length": -600}, ": input_length must be a whole number of 0 or more"),
        ({"hash_ids": [1], "input_length": 10**18}, ": input_length must be a whole number of 2,147,483,647 or less"),
        ({"hash_ids": [1], "input_length": 600.5}, ": input_length must be a whole number, not a fraction"),
        (
            {"hash_ids": [1] * 50, "input_length": 10},
            "50 hash_ids for 10 tokens: they are no blocks of 512 tokens, nor of another power of",
        ),
        (
            {"hash_ids": [1] * 20, "input_length": 300},
            "20 hash_ids for 300 tokens: they are no blocks of 512 tokens, nor",
        ),
        (
            {"hash_ids": [1], "input_length": 600, "output_length": "7"},
            ": output_length must be a whole number, not a text",
        ),
        ("[1, 2]", "not a whole JSON object"),
        ('"text"', "not a whole JSON object"),
        ("null", "not a whole JSON object"),
        ("7", "not a whole JSON object"),
        ("plain text", "not a whole JSON object"),
        ('{"prompt": "cut o', "not a whole JSON object"),
        ('{"seed": ' + "1" * 5000 + "}", "not a whole JSON object"),
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
        (b"\x1f\x8b\x08\x00\x00\n", "is gzip: unpack it first\n"),
        (lzma.compress(b"one\n")[:-20], "is xz, but damaged: it cannot be unpacked\n"),
        (lzma.compress(b"one\n" * 1000)[:30] + bytes(30), "is xz, but damaged"),
        (lzma.compress(b"one\n" * 2000), "has more than 0 GiB when it is unpacked\n"),
        (b"one\ntwo\n\xe9\n", ", line 3: not UTF-8"),
        ("one\ntwo".encode("utf-16"), "is UTF-16, and requests are read as UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16-be"), "is UTF-16, and requests are read as UTF-8"),
        (
            b'{"prompt": "x"}\xef\xbb\xbf{"prompt": "x"}',
            ", line 1: not a whole JSON object; files without a last line end",
        ),
        (b"one\ntwo\x00\n", ", line 2: not text, but zero bytes"),
        (b"x" * 2000, ", line 1: more than 0 MiB"),
        (b'{\n  "prompt": 1\n}\n', ", line 1: not a whole JSON object"),
        (b'[\n  {"prompt": 1}\n]\n', "is an array over several lines: write one request a line (JSONL)"),
        (b'[{"prompt": "x"}]', "is an array: write one request a line (JSONL)"),
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
    monkeypatch.setattr("sglang_pat.estimate.prompts.LONGEST", 1000)
    monkeypatch.setattr("sglang_pat.estimate.prompts.LARGEST", 5000)
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
        ([], "config.json: not a JSON object"),
        (7, "config.json: not a JSON object"),
        ({}, "config.json has no num_attention_heads\n"),
        ({"text_config": [1]}, "config.json has no num_attention_heads\n"),
        ({"text_config": {"hidden_size": 4}}, "config.json has no num_attention_heads\n"),
        (changed(num_attention_heads=0), ": num_attention_heads must be a whole number of 1 or more"),
        (changed(num_attention_heads=[32]), ": num_attention_heads must be "),
        (changed(num_attention_heads="32"), ": num_attention_heads must be "),
        (changed(num_attention_heads=10**9), ": num_attention_heads must be a whole number of 4,096 or less"),
        (changed(num_key_value_heads=0), ": num_key_value_heads must be a whole number of 1 or more"),
        (changed(num_key_value_heads=-8), ": num_key_value_heads must be "),
        (changed(head_dim=0), ": head_dim must be a whole number of 1 or more"),
        (changed(head_dim=128.5), ": head_dim must be "),
        (changed(hidden_size=-4096), ": hidden_size must be "),
        (changed(intermediate_size=None), "config.json has no intermediate_size"),
        (changed(vocab_size={}), ": vocab_size must be "),
        (changed(num_hidden_layers=True), ": num_hidden_layers must be "),
        (changed(num_key_value_heads=5), ": 32 attention heads cannot share 5 KV heads evenly"),
        (changed(head_dim=None, hidden_size=4097), ": a hidden size of 4097 is not a multiple of 32 heads"),
        (
            changed(head_dim=80),
            "there are no kernels for a head dimension of 80 on a GPU (64, 96, 128, 192, 256 for both K and V are, and 192 for K with 128 "
            "for V)",
        ),
        (
            changed(v_head_dim=64),
            "there are no kernels for head dimensions of 128 (K) and 64 (V) on a GPU",
        ),
        (changed(layer_types=["full_attention"] * 35), ": it names 35 of its 36 layers"),
        (changed(hybrid_override_pattern="M*"), ": it names 2 of its 36 layers"),
        (changed(hybrid_layer_pattern=[]), ": it names 0 of its 36 layers"),
        (changed(attention_chunk_size=8192), ": layers of the kind 'chunked_attention' cannot be estimated"),
        (changed(layer_types=["jet"] * 36), ": layers of the kind 'jet' cannot be estimated"),
        (changed(layer_types=["linear_attention"] * 36), ": no layer has KV"),
        (changed(full_attention_interval=37), ": no layer has KV"),
        (changed(full_attention_interval=0), ": full_attention_interval must be a whole number of 1 or more"),
        (changed(hybrid_layer_pattern="0110"), ": hybrid_layer_pattern must be "),
        (changed(layer_types=["sliding_attention"] * 36), "sliding_window does not say how long"),
        (changed(model_type="gemma2"), "sliding_window does not say how long"),
        (changed(model_type="gemma2", sliding_window=-1), "sliding_window does not say how long"),
        (changed(model_type="gemma2", sliding_window=1 << 40), ": sliding_window must be "),
        (
            changed(hybrid_layer_pattern=[1] * 36, sliding_window=128, swa_num_key_value_heads=5),
            ": 32 attention heads cannot share 5 KV heads evenly",
        ),
        *((changed(**{name: [1]}), f": models whose layers differ by {name} cannot") for name in models.UNREAD),
        (
            changed(kv_lora_rank=512, index_topk=64),
            ": sparse attention (DSA) is not supported by --attention-backend pat",
        ),
        (
            changed(kv_lora_rank=512, linear_attn_config={"kda_layers": [1]}),
            ": MLA in hybrid models is not supported by",
        ),
        (
            changed(kv_lora_rank=512, llama_4_scaling={}),
            ": MLA with scaling by position (Mistral Large 3) is not supported by",
        ),
        *((changed(num_experts=wrong), ": num_experts must be ") for wrong in ("8", -3, 0.5, True, {"a": 1})),
        ({**changed(layer_types=["x" * 10**5] * 36)}, f"layers of the kind '{'x' * 40}' cannot be estimated"),
        ("{", "config.json: not JSON"),
        ("", "config.json: not JSON"),
        ("[" * 10**5, "config.json: not JSON"),
        (b"\xff\x00\xff", "config.json: not JSON"),
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
    assert shapes(tmp_path, config) == [(36, 32, 8, 128, 128, 0)]
    assert shapes(tmp_path, changed(num_key_value_heads=None)) == [(36, 32, 32, 128, 128, 0)]


def shapes(tmp_path: Path, config: dict) -> list[tuple[int, ...]]:
    """(layers, heads, KV heads, dimensions of K and of V, window) of each kind of a model's layers with KV."""
    layers = read_model(write(tmp_path / "config.json", [config])).layers
    return [
        (count, spec.heads, spec.kv_heads, spec.head_dim, spec.v_head_dim, spec.window)
        for spec, count in layers.items()
    ]


def family(model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict:
    names = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    values = dict(zip(names, (model_type, layers, heads, kv_heads, hidden), strict=True))
    return {"intermediate_size": 4 * hidden, "vocab_size": 100_000, **values, **more}


QWEN3_NEXT = family("qwen3_next", 48, 16, 2, 2048, head_dim=256, full_attention_interval=4, num_experts=512)
QWEN3_5 = family("qwen3_5_moe_text", 40, 16, 2, 2048, num_experts=256)
del QWEN3_5["intermediate_size"]  # all layers have experts
NEMOTRON_H = family(
    "nemotron_h", 52, 32, 8, 4096, hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
)
FALCON_H1 = family("falcon_h1", 36, 12, 2, 2048, head_dim=128)
"""Whose layers have states and KV."""
GPT_OSS = family(
    "gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, num_local_experts=32,
    layer_types=["sliding_attention", "full_attention"] * 12,
)  # fmt: skip
MIMO_V2 = family(
    "mimo_v2_flash", 48, 64, 4, 4096, head_dim=192, v_head_dim=128, swa_num_attention_heads=64, swa_num_key_value_heads=8,
    swa_head_dim=192, swa_v_head_dim=128, sliding_window=128, sliding_window_size=128, attention_chunk_size=128, n_routed_experts=256,
    hybrid_layer_pattern=[0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
)  # fmt: skip
GEMMA3 = family("gemma3_text", 48, 16, 8, 3840, sliding_window=1024)
del GEMMA3["vocab_size"]
GEMMA2 = family("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096, sliding_window_size=4096)
EXAONE4 = family("exaone4", 64, 40, 8, 5120, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3_NEXT, [(12, 16, 2, 256, 256, 0)]),
        (QWEN3_5, [(10, 16, 2, 256, 256, 0)]),
        (NEMOTRON_H, [(4, 32, 8, 128, 128, 0)]),
        # Nemotron Nano's heads are wider than its hidden size has room for.
        ({**NEMOTRON_H, "hidden_size": 4480, "num_attention_heads": 40}, [(4, 40, 8, 128, 128, 0)]),
        (
            family("granitemoehybrid", 40, 12, 4, 1536, layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4),
            [(4, 12, 4, 128, 128, 0)],
        ),
        (family("lfm2", 16, 32, 8, 2048, full_attn_idxs=[2, 5, 8, 10, 12, 14]), [(6, 32, 8, 64, 64, 0)]),
        (FALCON_H1, [(36, 12, 2, 128, 128, 0)]),
        (GPT_OSS, [(12, 64, 8, 64, 64, 0), (12, 64, 8, 64, 64, 128)]),
        (MIMO_V2, [(9, 64, 4, 192, 128, 0), (39, 64, 8, 192, 128, 129)]),
        (
            {**MIMO_V2, "swa_num_attention_heads": 32, "swa_head_dim": 96, "swa_v_head_dim": 64},
            [(9, 64, 4, 192, 128, 0), (39, 32, 8, 96, 64, 129)],
        ),
        ({**MIMO_V2, "swa_v_head_dim": None}, [(9, 64, 4, 192, 128, 0), (39, 64, 8, 192, 192, 129)]),
        # What is said of layers that predict further tokens counts for nothing.
        (
            {**MIMO_V2, "num_hidden_layers": 6, "sliding_window": None},
            [(2, 64, 4, 192, 128, 0), (4, 64, 8, 192, 128, 129)],
        ),
        ({**GPT_OSS, "num_hidden_layers": 3}, [(1, 64, 8, 64, 64, 0), (2, 64, 8, 64, 64, 128)]),
        ({"text_config": GEMMA3}, [(8, 16, 8, 256, 256, 0), (40, 16, 8, 256, 256, 1024)]),
        (GEMMA2, [(21, 16, 8, 256, 256, 0), (21, 16, 8, 256, 256, 4096)]),
        (EXAONE4, [(16, 40, 8, 128, 128, 0), (48, 40, 8, 128, 128, 4096)]),
        ({**EXAONE4, "sliding_window": None, "sliding_window_pattern": None}, [(64, 40, 8, 128, 128, 0)]),
        (
            family("cohere2", 32, 32, 8, 4096, sliding_window=4096),
            [(8, 32, 8, 128, 128, 0), (24, 32, 8, 128, 128, 4097)],
        ),
        # SGLang's models for these see no windows, whatever is said of them.
        (family("mistral", 32, 32, 8, 4096, sliding_window=4096), [(32, 32, 8, 128, 128, 0)]),
    ],
)
def test_layers_are_counted_by_what_they_are(tmp_path: Path, config: dict, expected: list) -> None:
    assert shapes(tmp_path, config) == expected


def test_layers_are_what_sglang_takes_them_for() -> None:
    from sglang.srt.configs import NemotronHConfig, Qwen3NextConfig
    from sglang.srt.configs.model_config import get_hybrid_layer_ids
    from transformers import AutoConfig, PretrainedConfig

    def kinds(config: dict) -> list[str]:
        return models._kinds(msgspec.convert(config, models.Shape))

    def full(config: dict) -> list[int]:
        return [layer for layer, kind in enumerate(kinds(config)) if kind == "full_attention"]

    for config, sglangs in ((QWEN3_NEXT, Qwen3NextConfig(**QWEN3_NEXT)), (NEMOTRON_H, NemotronHConfig(**NEMOTRON_H))):
        assert full(config) == sglangs.full_attention_layer_ids
    for config, name in ((GPT_OSS, "GptOssForCausalLM"), (MIMO_V2, "MiMoV2FlashForCausalLM")):
        windowed, others = get_hybrid_layer_ids([name], PretrainedConfig(**config))
        assert full(config) == others and len(windowed) + len(others) == config["num_hidden_layers"]
    for name, defaults in model_config.DEFAULTS.items():
        least: dict = (
            {"layers_block_type": ["mamba", "attention"]} if name == "nemotron_h" else {"num_hidden_layers": 24}
        )
        config = {**family(name, 24, 8, 8, 1024), **defaults}
        known = AutoConfig.for_model(name, **least)
        for key in defaults.keys() - {"sliding_window_pattern", "full_attention_interval"}:
            assert getattr(known, key) == defaults[key], (name, key)
        if name != "nemotron_h":
            assert kinds(config) == known.layer_types, name


def traced(requests: int, tokens: int, shared: int) -> list[Prompt]:
    """Requests of so many tokens each, one of them generated; multiples of TRACE_BLOCK of them are shared."""
    common = list(range(shared // TRACE_BLOCK))
    return [Prompt([*common, -i], TRACE_BLOCK, tokens - 1, 0) for i in range(1, requests + 1)]


def row(tmp_path: Path, config: dict, prompts: list[Prompt], kv_cache: str = "auto") -> list[float]:
    """(batch, percent shared, GB of KV unpacked and packed, microseconds of FA3's and PAT's attention, milliseconds of their steps) of all requests."""
    model = read_model(write(tmp_path / "config.json", [config]))
    (found,) = estimate(prompts, model, "h200", [len(prompts)], kv_cache).batches
    steps = [found.step_ms[name] for name in ("fa3", "pat")] if found.step_ms else []
    kv = [found.kv_bytes[name] / 1e9 for name in ("unpacked", "pat")]
    return [found.batch, 100 * found.shared, *kv, *(found.attention_us[name] for name in ("fa3", "pat")), *steps]


def test_layers_without_kv_cost_nothing(tmp_path: Path) -> None:
    prompts = traced(64, 20_000, 16_384)
    plain = {**QWEN3_NEXT, "model_type": "qwen3_moe", "full_attention_interval": None}
    hybrid, whole = row(tmp_path, QWEN3_NEXT, prompts), row(tmp_path, plain, prompts)
    # 12 layers with 2 KV heads, K and V of 256 dimensions of 2 bytes.
    assert hybrid[2] == pytest.approx(64 * 20_000 * 12 * 2 * 512 * 2 / 1e9, abs=0.005)
    assert whole[2:4] == pytest.approx([4 * hybrid[2], 4 * hybrid[3]], abs=0.02)
    assert hybrid[:2] == whole[:2] and hybrid[4:] == whole[4:], "what is shared, and the time of a layer"
    assert row(tmp_path, QWEN3_NEXT, prompts, "fp8_e4m3")[2] == pytest.approx(hybrid[2] / 2, abs=0.01)


def test_unequal_dimensions_and_heads_by_layer_are_counted(tmp_path: Path) -> None:
    prompts = traced(64, 20_000, 0)
    # K of 192 and V of 128 dimensions, 2 bytes: 9 layers with 4 KV heads see everything, 39 with 8 their last 129 tokens.
    read = 64 * 320 * 2 * (9 * 4 * 20_000 + 39 * 8 * 129)
    _, shared, unpacked, packed, *_ = row(tmp_path, MIMO_V2, prompts)
    assert shared == 0 and unpacked == packed == pytest.approx(read / 1e9, abs=0.005)
    dense = read_model(write(tmp_path / "dense.json", [{**MIMO_V2, "n_routed_experts": None}]))
    # Q and the projection of what comes out have 64 heads.
    matrices = 9 * (64 + 4) * (192 + 128) + 39 * (64 + 8) * (192 + 128) + 48 * 3 * 4 * 4096
    assert dense.weight_bytes == 2 * 4096 * (matrices + 100_000)


def test_windows_are_read_alone_by_requests_longer_than_they_are(tmp_path: Path) -> None:
    prompts = traced(64, 20_000, 16_384)
    _, _, unpacked, packed, *_ = row(tmp_path, GPT_OSS, prompts)
    _, _, all_unpacked, all_packed, *_ = row(tmp_path, {**GPT_OSS, "layer_types": None}, prompts)
    token = 8 * 2 * 64 * 2
    assert unpacked == pytest.approx(64 * 12 * token * (20_000 + 128) / 1e9, abs=0.005)
    assert all_unpacked == pytest.approx(64 * 24 * token * 20_000 / 1e9, abs=0.005)
    assert packed == pytest.approx(all_packed / 2 + 64 * 12 * token * 128 / 1e9, abs=0.01)
    assert packed < unpacked / 2


def test_requests_within_their_windows_share(tmp_path: Path) -> None:
    """As long as a window and not longer: as if there were none."""
    plain = {**GEMMA2, "model_type": "llama"}
    for tokens, alike in ((4096, True), (4097, False)):
        prompts = traced(32, tokens, 3584)
        windowed, whole = row(tmp_path, GEMMA2, prompts), row(tmp_path, plain, prompts)
        assert (windowed == whole) == alike and whole[3] < whole[2] / 3


def test_long_and_short_requests_in_a_window(tmp_path: Path) -> None:
    model = read_model(write(tmp_path / "config.json", [{**EXAONE4, "sliding_window_pattern": "L" * 65}]))
    ((spec, layers),) = model.layers.items()
    assert layers == 64 and spec.window == 4096
    gpu, lengths = GPUS["h200"][costs.Measured(costs.DIMS)], [3000] * 16 + [5000]
    batch = Batch(lengths, [Node(0, 2048, list(range(17)))])
    found = costs.step(batch, [(costs.pack_config(spec, gpu), layers)], gpu)
    token = 64 * 8 * 2 * 128 * 2
    assert found.unpacked_bytes == token * (16 * 3000 + 4096)
    assert found.packed_bytes == token * (2048 + 16 * (3000 - 2048) + 4096)
    assert found.kept_bytes == token * (2048 + 16 * (3000 - 2048) + 5000 - 2048), (
        "there is room for all of the tokens in less"
    )
    # A launch takes so long, whatever is read.
    assert list(found.attention_us) == ["fa3", "flashinfer", "pat"]
    for name, us in found.attention_us.items():
        assert us > 64 * (gpu.base if name == "pat" else gpu.baselines[name].base)


def test_layers_with_windows_and_without_add_up(tmp_path: Path) -> None:
    prompts = traced(64, 24_000, 16_384)
    rows = [
        row(tmp_path, {**GEMMA2, "layer_types": kinds * 21}, prompts)
        for kinds in (["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"])
    ]
    full, windowed, mixed = rows
    assert len(mixed) == 8 and mixed[:2] == full[:2] == windowed[:2]
    for column, precision in ((2, 0.01), (3, 0.01), (4, 1), (5, 1), (6, 0.1), (7, 0.1)):
        assert windowed[column] <= full[column] and (column > 2 or windowed[column] < full[column])
        assert mixed[column] == pytest.approx((full[column] + windowed[column]) / 2, abs=precision), column


def test_what_windows_have_left_need_not_be_kept(tmp_path: Path) -> None:
    prompts = traced(64, 100_000, 0)
    for kind, full in (("sliding_attention", False), ("full_attention", True)):
        model = read_model(write(tmp_path / "config.json", [{**GEMMA2, "layer_types": [kind] * 42}]))
        found = estimate(prompts, model, "h200", [64])
        assert found.batches[0].fits == (not full)
        verdict = "The KV of 64 requests does not fit in the 127 of 141 GB that SGLang takes for weights and KV: "
        assert (verdict in found.verdict) == full and "1 request at once" not in found.verdict
        (line,) = [line for line in found.lines() if "%" in line]
        assert line.endswith("does not fit") == full


@pytest.mark.parametrize(
    ("config", "unlike"),
    [
        (QWEN3_NEXT, 0),
        (QWEN3_5, 0),
        (MIMO_V2, 256),
        (GEMMA2, 256),
        (EXAONE4, 128),
        (NEMOTRON_H, 0),
        (FALCON_H1, 0),
        (GPT_OSS, 128),
        ({**MIMO_V2, "head_dim": 256, "v_head_dim": 256, "swa_head_dim": 128, "swa_v_head_dim": 128}, 128),
    ],
)
def test_what_was_not_measured_is_said(tmp_path: Path, config: dict, unlike: int) -> None:
    """By the heads that were measured, if the model has others or windows."""
    found = estimate(traced(8, 3000, 1024), read_model(write(tmp_path / "config.json", [config])), "h200", [8])
    said, lines = " ".join(found.assumptions), list(found.lines())
    assert re.findall(r"heads of (\d+) without windows", said) == [str(unlike)] * bool(unlike)
    dense = config in (GEMMA2, EXAONE4)
    assert ("is not known: it has experts, latents, or layers without KV" in said) != dense
    assert ("up to 40 at worst" in said) != dense
    assert (found.batches[0].step_ms is not None) == dense, "steps of dense models only"
    # Batch, shared, twice KV, three times attention, three times a step, faster.
    assert len(next(line for line in lines if "%" in line).split()) == (11 if dense else 8)
    assert any(line.startswith(f"faster: {'step' if dense else 'attention'} time of FA3") for line in lines)
    assert lines[-1].startswith("Decode steps compared" if dense else "Attention compared")


def test_weights_and_kv_have_what_sglang_takes_for_them(tmp_path: Path) -> None:
    """Not all of the memory: 127 of 141 GB, 66 of 80."""
    large = changed(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, intermediate_size=28672)
    model = read_model(write(tmp_path / "large.json", [large]))
    assert 130e9 < (model.weight_bytes or 0) < 145e9, "70 billion parameters"
    for gpu, place in (("h100", "66 of 80 GB"), ("h200", "127 of 141 GB")):
        found = estimate(traced(8, 3000, 1024), model, gpu, [8])
        weights = f"{(model.weight_bytes or 0) / 1e9:.0f} GB in bfloat16"
        assert f" The weights alone ({weights}) do not fit in the {place} that SGLang takes" in found.verdict
        assert "The KV of" not in found.verdict and not found.batches[0].fits
    small = read_model(CONFIG)
    found = estimate(traced(64, 20_000, 0), small, "h200", [1, 8, 32, 40, 64])
    kept = [row.needed_bytes - (small.weight_bytes or 0) for row in found.batches]
    assert kept == [size * 20_000 * 36 * 8 * 256 * 2 for size in (1, 8, 32, 40, 64)]
    assert [row.fits for row in found.batches] == [True, True, True, False, False], "133 GB fit in all of the memory"
    assert found.verdict.endswith(
        " The KV of 40 and 64 requests does not fit in the 127 of 141 GB that SGLang takes for weights and KV: 189 GB beside 15 GB of weights."
    )
    assert found.static_bytes == pytest.approx(0.904 * 141e9) and "--mem-fraction-static is 0.90" in str(
        found.assumptions
    )
    assert found.assumptions[0] == "One GPU; with --tp-size the gain is smaller."


@pytest.mark.parametrize(("gpu", "mebibytes"), [("h200", 143_771), ("h100", 81_559)])
def test_the_part_for_weights_and_kv_is_sglangs_default(
    monkeypatch: pytest.MonkeyPatch, gpu: str, mebibytes: int
) -> None:
    """With so many MiB, which such a GPU's driver reports; only later releases let it be asked without a GPU."""
    hook = pytest.importorskip("sglang.srt.arg_groups.memory_hook")
    from sglang.srt.arg_groups import overrides
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path=str(CONFIG.parent), device="cuda")
    graphs = CudaGraphConfig(PhaseConfig(backend="full"), PhaseConfig(backend="breakable"))
    overrides.declare_resolution(given, "test", cuda_graph_config=graphs)
    monkeypatch.setattr(hook, "get_device_memory_capacity", lambda _: mebibytes)
    monkeypatch.setattr(hook, "model_config_of", lambda _: SimpleNamespace(is_multimodal=False))
    for module in (hook, overrides):
        monkeypatch.setattr(module, "use_mla_backend", lambda _: False)
    hook.handle_gpu_memory_settings(given)
    found = overrides.resolved_view(given).mem_fraction_static
    assert costs.static_fraction(GPUS[gpu][costs.Measured(costs.DIMS)]) == pytest.approx(found, abs=0.0015)


def test_layers_are_listed(tmp_path: Path) -> None:
    found = estimate(
        traced(8, 3000, 1024), read_model(write(tmp_path / "config.json", [MIMO_V2])), "h200", [8], "fp8_e4m3"
    )
    assert (
        "- Layers with KV: 9 of 64/4 heads of 192 and 128, float8_e4m3fn, 39 of 64/8 heads of 192 and 128, float8_e4m3fn, a window of 129."
        in list(found.lines())
    )
    assert [msgspec.structs.astuple(layer) for layer in found.layers] == [
        (9, 64, 4, 192, 128, 0),
        (39, 64, 8, 192, 128, 129),
    ]


def test_conversations_may_be_long(tmp_path: Path) -> None:
    """Each turn has all before it in front: the tree is as deep as the file is long."""
    text = "".join(f"{turn:0{BLOCK * CHARS_PER_TOKEN}d}" for turn in range(1200))
    size = BLOCK * CHARS_PER_TOKEN
    path = write(tmp_path / "turns", [{"prompt": text[: size * (turn + 1)]} for turn in range(1200)])
    (row,) = estimate(read(path, 5), read_model(CONFIG), "h200", [1200]).batches
    assert row.batch == 1200 and row.shared > 0.99


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
LENGTHS = {"in": st.integers(1, 1 << 20), "out": st.integers(0, 999)}
TURN = {"think_s": st.floats() | JUNK, "like": st.integers(-1, 3), "keep_blocks": st.integers(-1, 40)}
TURNS = {
    "session": st.integers(0, 3), "tool_tokens": st.integers(-1, 1000), "system_tokens": st.integers(-1, 1000),
    "turns": st.lists(st.fixed_dictionaries(LENGTHS, optional=TURN), max_size=4) | JUNK,
}  # fmt: skip
PARENT = {"parent": st.integers(0, 3), "after_turn": st.integers(0, 3)}
ROWS = (
    JUNK
    | st.fixed_dictionaries({}, optional=FIELDS)
    | st.fixed_dictionaries(HASHED)
    | st.fixed_dictionaries(TURNS, optional=PARENT)
    | st.just(GOOD)
)
DIMS = st.integers(-1, 70) | st.sampled_from([128, 4096]) | JUNK
KINDS = st.lists(st.sampled_from([*models.WITH_KV, *models.WITHOUT_KV]), min_size=30, max_size=64)
CONFIGS = st.builds(
    lambda changes: changed(**changes),
    st.fixed_dictionaries({}, optional={
        "num_attention_heads": DIMS, "num_key_value_heads": DIMS, "head_dim": st.sampled_from([64, 128, 256]) | JUNK,
        "hidden_size": DIMS, "num_hidden_layers": DIMS, "text_config": JUNK, "num_experts": JUNK, "vocab_size": DIMS,
        "model_type": st.sampled_from([*model_config.DEFAULTS, *models.SEE_ONE_MORE, "falcon_h1"]) | JUNK,
        "v_head_dim": st.sampled_from([64, 128]) | JUNK, "swa_num_key_value_heads": DIMS, "swa_head_dim": DIMS,
        "layer_types": KINDS | JUNK, "layers_block_type": KINDS | JUNK, "hybrid_override_pattern": st.text("M*-", max_size=64) | JUNK,
        "full_attention_interval": DIMS, "full_attn_idxs": st.lists(st.integers()) | JUNK, "sliding_window": TOKENS | JUNK,
        "sliding_window_pattern": DIMS | st.text("LG"), "hybrid_layer_pattern": st.lists(st.integers(0, 1), max_size=64) | JUNK,
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
    except (EstimateError, model_config.ModelError):
        pass
    for lines in [rows, *([row] for row in rows)]:
        try:
            prompts = read(write(folder / "requests", lines), output=5)
            shown = estimate(prompts, model or read_model(CONFIG), "h200", [size])
        except EstimateError:
            continue
        assert next(shown.lines()).startswith(f"{len(prompts):,} request{'s' * (len(prompts) > 1)} with ")


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


@pytest.mark.parametrize("block", [16, 64, 512, 1024])
def test_a_trace_may_have_other_blocks(tmp_path: Path, block: int) -> None:
    """They say nowhere how many tokens a hash id stands for."""

    def row(number: int, tokens: int) -> dict:
        own = -(-tokens // block) - 2048 // block
        return {
            "input_length": tokens,
            "hash_ids": [*range(2048 // block), *range(10**6 * number, 10**6 * number + own)],
        }

    # A line without ids, and one of which the last block is not named, since it is not full.
    others = [
        {"input_length": 9000, "hash_ids": []},
        {"input_length": 20 * block + 1, "hash_ids": list(range(90, 110))},
    ]
    prompts = read(write(tmp_path / "trace", [row(i, 4000 + i) for i in range(1, 9)] + others), output=1)
    assert {prompt.block for prompt in prompts} == {block}
    assert costs.repeated(batch_of(prompts).roots) == 7 * 2048
    wrong = [row(1, 4000), row(2, 4000), {"input_length": 4000, "hash_ids": [1] * (4000 // block * 2)}]
    with pytest.raises(
        EstimateError, match=f"line 3: .* hash_ids for 4,000 tokens: they are no blocks of {block} tokens"
    ):
        read(write(tmp_path / "wrong", wrong), output=1)


def test_benchmarks_take_traces_of_mooncakes_blocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import traces

    row = {"timestamp": 27.0, "input_length": 1024.0, "output_length": 5, "hash_ids": [1, 2]}
    assert traces.rows(write(tmp_path / "trace", [row])) == [{**row, "timestamp": 27, "input_length": 1024}]
    with pytest.raises(SystemExit, match="has blocks of 16 tokens, and is none of Mooncake's, which have 512"):
        traces.rows(write(tmp_path / "other", [{**row, "hash_ids": list(range(64))}]))


def test_what_a_job_saves_is_what_was_computed_before(tmp_path: Path) -> None:
    shared = list(range(100, 100 + 2 * BLOCK))
    prompts = [shared + [i] * BLOCK for i in range(3)] + [[7] * BLOCK + shared]
    path = write(tmp_path / "in", [{"body": {"prompt": prompt}} for prompt in prompts])
    assert costs.repeated(batch_of(read(path, 1)).roots) == 4 * BLOCK


def test_text_counts_four_characters_a_token(tmp_path: Path) -> None:
    (prompt,) = read(write(tmp_path / "prompts", ["x" * 1000]), output=5)
    assert prompt.tokens == 1000 // CHARS_PER_TOKEN and len(prompt.blocks) == prompt.tokens // BLOCK


def test_sharing_pays_and_nothing_shared_does_not(tmp_path: Path) -> None:
    model = read_model(CONFIG)

    def columns(gpu: str, prompts: list[str]) -> tuple[str, list[float]]:
        path = write(tmp_path / "prompts", prompts)
        found = estimate(read(path, 100), model, gpu, [64])
        row = next(line for line in found.lines() if "%" in line)
        assert found.verdict.startswith("Decode steps compared with FA3: ")
        return found.verdict.partition(": ")[2], [float(value.rstrip("%x")) for value in row.split()]

    long = "the same words for everybody, " * 1000
    for gpu in GPUS:
        verdict, row = columns(gpu, [long + str(i) for i in range(64)])
        size, shared, whole, packed, fa3, flashinfer, pat, fa3_ms, _, pat_ms, faster = row
        assert size == 64 and shared > 90 and packed < whole / 20
        assert pat < flashinfer / 3 and pat < fa3 / 3
        assert faster == pytest.approx(fa3_ms / pat_ms, abs=0.02) and faster > 1.5
        assert verdict == f"{faster:.1f}x faster with 64 requests at once."
        verdict, (_, shared, whole, packed, *_, faster) = columns(gpu, [f"{i:02d}, " * 2000 for i in range(64)])
        assert shared == 0 and packed == whole and 0.95 < faster < 1.05
        assert verdict == "no gain with 64 requests at once."


def test_batches_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    """Of which one half shares nearly everything, and the other one nothing."""
    alike, unlike = ["the same words, " * 500 + str(i) for i in range(128)], [f"{i:03d}, " * 1600 for i in range(128)]
    for prompts in ([*alike, *unlike], [*unlike, *alike]):
        path = write(tmp_path / "prompts", prompts)
        (row,) = estimate(read(path, 100), read_model(CONFIG), "h200", [16]).batches
        assert 0.40 < row.shared < 0.55


def test_an_fp8_cache_is_half_of_one_of_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    def found(*flags: str) -> dict:
        assert cli.main(["estimate", str(PROMPTS), "--model", str(CONFIG), "--batch", "8", "--json", *flags]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["kv_cache"].startswith("float8") == bool(flags)
        return result["batches"][0]

    plain, small = found(), found("--kv-cache-dtype", "fp8_e4m3")
    assert found("--kv-cache-dtype", "fp8_e5m2") == small
    assert small["shared"] == plain["shared"]
    assert small["kv_bytes"]["unpacked"] == plain["kv_bytes"]["unpacked"] / 2
    # Plans are others: reading again is cheaper.
    assert plain["kv_bytes"]["pat"] / 2 <= small["kv_bytes"]["pat"] < 0.7 * plain["kv_bytes"]["pat"]
    # Times have coefficients of their own: so few tokens take as long as a launch.
    assert small["attention_us"]["pat"] <= 1.25 * plain["attention_us"]["pat"]


def test_what_was_not_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["estimate", str(PROMPTS), "--model", str(CONFIG), "--gpu", "h100", "--kv-cache-dtype", "fp8_e4m3"]
    assert "--gpu h100 was not measured with a KV cache of 8 bits" in sentence(capsys, *flags)


def documented(page: str) -> set[str]:
    """What a page of the documentation has in its section on JSON as code."""
    section = (ROOT / "docs" / page).read_text().split("## JSON\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section))


def keys(value: Any) -> set[str]:
    """All keys of a JSON value."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()


def test_json_has_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", str(PROMPTS), "--model", str(CONFIG), "--batch", "2,4", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in found["batches"]] == [2, 4, 8] and found["baseline"] == "fa3"
    assert keys(found) <= documented("estimate.md") and {"verdict", "step_ms", "flashinfer"} <= keys(found)


@pytest.mark.parametrize(("terminal", "seconds", "said"), [(True, 0, False), (True, 0.3, True), (False, 0.3, False)])
def test_a_terminal_is_told_what_takes_so_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, seconds: float, said: bool
) -> None:
    monkeypatch.setattr(parser, "PATIENCE", 0.1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with parser.patience("reading a file"):
        time.sleep(seconds)
    time.sleep(0.2)
    assert capsys.readouterr() == ("", "reading a file\n" if said else "")


def test_large_heads_were_measured_on_an_h200(tmp_path: Path) -> None:
    model = read_model(write(tmp_path / "config.json", [QWEN3_NEXT]))
    with pytest.raises(
        EstimateError, match="h100 was not measured with heads of more than 128 dimensions: give --gpu h200"
    ):
        estimate(traced(8, 3000, 1024), model, "h100", [8])


def test_drafts(tmp_path: Path) -> None:
    """More rows take no less time, and read the same KV; what a step takes beside attention is not known."""
    model = read_model(write(tmp_path / "config.json", [changed()]))
    one, four = (estimate(traced(32, 4000, 2048), model, "h200", [32], "auto", tokens) for tokens in (1, 4))
    assert one.batches[0].kv_bytes["unpacked"] == four.batches[0].kv_bytes["unpacked"]
    assert 0.9 < four.batches[0].attention_us["pat"] / one.batches[0].attention_us["pat"] < 4
    assert one.batches[0].step_ms is not None and four.batches[0].step_ms is None
    assert four.verdict.startswith("Attention compared with FA3: ") and "drafts are part of it" in " ".join(
        four.assumptions
    )
    for gpu, tokens in (("h200", 3), ("h100", 4)):
        with pytest.raises(
            EstimateError, match=f"--draft-tokens {tokens}: drafts of 4 tokens were measured on an H200, and no others"
        ):
            estimate(traced(8, 3000, 1024), model, gpu, [8], "auto", tokens)


def calibrated(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"estimate-{name}.json").read_text())


@pytest.mark.parametrize(("name", "measured"), [(name, measured) for name, known in GPUS.items() for measured in known])
def test_predictions_are_those_of_the_calibration(name: str, measured: costs.Measured) -> None:
    result, gpu = calibrated(name), GPUS[name][measured]
    (found,) = (one for one in result["kernels"] if (tuple(one["dims"]), one["bits"], one["tokens"]) == measured)
    assert {*gpu.baselines, "pat"} == found.keys() - set(measured._fields)
    for backend in ("pat", *gpu.baselines):
        known = dict(found[backend])
        del known["error"]
        assert len(known) == (3 if backend == "pat" else 4)
        for coefficient, value in known.items():
            ours = gpu if backend == "pat" else gpu.baselines[backend]
            assert getattr(ours, coefficient) == pytest.approx(value, rel=0.01), (backend, coefficient)
    assert gpu.rest_ms == pytest.approx(result["rest_ms"], rel=0.01)
    assert gpu.request_us == pytest.approx(result["request_us"], rel=0.01)


def test_estimated_gains_over_fa3_are_those_that_were_measured() -> None:
    """Without sharing to 0.04; with it, the gain that is promised was exceeded."""
    for name in GPUS:
        steps: dict[tuple[str, str], dict[str, dict]] = {}
        for record in calibrated(name)["steps"]:
            steps.setdefault((record["file"], record["workload"]), {})[record["backend"]] = record
        for (file, workload), found in steps.items():
            measured, predicted = (found["fa3"][key] / found["pat"][key] for key in ("measured_ms", "predicted_ms"))
            if file.startswith("steps") and "_" not in workload:
                assert predicted == pytest.approx(measured, abs=0.045), workload
            elif workload.startswith("gsp"):
                assert 1.5 < predicted < measured, workload


def test_the_calibration_is_of_the_results_that_are_there(tmp_path: Path) -> None:
    """Of the kernels, steps and servers in benchmarks/results, with the tables and the planner of today."""
    folder = ROOT / "benchmarks"
    command = [sys.executable, "calibrate.py", "--output", tmp_path]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)

    def numbers(value: object) -> list[float]:
        if isinstance(value, dict | list):
            return [number for one in (value.values() if isinstance(value, dict) else value) for number in numbers(one)]
        return [value] if isinstance(value, int | float) else []

    for name in GPUS:
        found = json.loads((tmp_path / f"estimate-{name}.json").read_text())
        assert len(numbers(found)) > 40
        expected = pytest.approx(numbers(calibrated(name)), rel=1e-4, abs=0.011)
        assert numbers(found) == expected, "python benchmarks/calibrate.py"


def test_the_rest_of_a_step_reads_the_weights_once_or_multiplies_with_them_for_each_request() -> None:
    gpu, weights = GPUS["h200"][costs.Measured(costs.DIMS)], 16_000_000_000
    few, many = costs.rest_ms(8, weights, gpu), costs.rest_ms(1000, weights, gpu)
    assert few["pat"] == pytest.approx(1.239 + 8 * 0.007919 + 16 / 4.4)
    assert many["fa3"] == pytest.approx(0.912 + 1000 * 0.007919 + 1000 * 16 / 790)


def test_weights_of_a_dense_model_are_counted(tmp_path: Path) -> None:
    assert 14e9 < (read_model(CONFIG).weight_bytes or 0) < 17e9, (
        "Qwen3-8B has 8.2 billion parameters, 0.6 of them embeddings"
    )
    config = json.loads(CONFIG.read_text())
    for experts in ({"num_experts": 8}, {"moe_num_experts": 64}, {"moe_num_experts": [64, 64]}):
        assert read_model(write(tmp_path / "config.json", [config | experts])).weight_bytes is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt cannot be read"),
        ([str(PROMPTS), "--model", "/nowhere"], "/nowhere cannot be read"),
        ([str(PROMPTS), "--gpu", "abacus"], "--gpu abacus: there are measurements for h200, h100 only"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", str(CONFIG)]
    assert cli.main(["estimate", *arguments, *model]) == 2
    assert message in capsys.readouterr().err


def test_mla(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """DeepSeek V2 Lite: of a token each layer keeps 576 numbers once, for all heads."""
    latents = changed(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=None,
        v_head_dim=128,
    )
    found = read_model(write(tmp_path / "config.json", [latents]))
    assert found.layers == {AttentionSpec(16, 1, 576, 512, FORMATS["bfloat16"], latent=True): 36}
    assert next(iter(found.layers)).cost().token_bytes == 1152 and found.weight_bytes is None
    command = "estimate", str(PROMPTS), "--model", str(tmp_path)
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["batches"][0]["attention_us"]) == {"fa3", "flashinfer", "pat"}
    copies = "copies the whole pool to 16 bits"
    assert not any(copies in said for said in result["assumptions"])
    assert cli.main([*command, "--json", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["batches"][0]["attention_us"]) == {"fa3", "pat"}
    assert any(copies in said for said in result["assumptions"])
    batch = result["batches"][-1]
    # Latents have 576 bytes, in 36 layers.
    assert batch["attention_us"]["fa3"] > costs.COPY_US * batch["needed_bytes"] / 576 / 36
    assert "with --kv-cache-dtype fp8_e4m3 and auto" in sentence(capsys, *command, "--kv-cache-dtype", "fp8_e5m2")
    for flag in (("--gpu", "h100"), ("--draft-tokens", "4")):
        assert "on an H200 and without drafts only" in sentence(capsys, *command, *flag)
    write(tmp_path / "config.json", [latents | {"num_attention_heads": 64, "num_key_value_heads": 64}])
    assert "MLA with 64 heads on a GPU packs nothing" in sentence(capsys, *command)
