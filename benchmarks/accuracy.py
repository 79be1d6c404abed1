"""What each backend and KV format makes of a trained model: perplexity of what is decoded, and greedy answers.

    python benchmarks/accuracy.py --model SMOLLM2 --texts PAPER... --backends fa3 pat --kv bfloat16 fp8_e4m3 int4 int2
    python benchmarks/accuracy.py --model GEMMA3 --texts PAPER... --backends fa3 pat --kv bfloat16 fp8_e4m3
    python benchmarks/accuracy.py --model SMOLLM2 --texts PAPER --backends torch_native pat --kv bfloat16 --shared 512 --requests 16 --answers 8

The first two are for a GPU, and write `results/accuracy-h200.json` on an H200; what another model left there is kept. The third is for a CPU. The first
backend with the first format is what the others are compared with. `python -m sglang_pat.demo.trained_model NAME FOLDER` writes such models.

**Perplexity.** The beginning of each text is prefilled, which gives `prefill_perplexity`, and stays in the cache. Then `--requests` requests at
once decode its end: each has the text up to its part as its prompt, all of it cached, and decodes the `--steps` tokens that follow. So each step
reads one text for all requests, packed. A logit processor of the server's chooses the text's next token whatever the model prefers, and tells
how likely it was. The tokens and their contexts are those of prefill: a right decode gives the same perplexity but for rounding. Each request's first
token is left out, as its logits come from prefill.

**Answers.** Greedy ones to `--answers` questions behind the beginnings of the first two texts. Where one parts from the first server's, the lead is
how much likelier that server found its own token than the other: log-probabilities apart. Everything runs twice on each server,
and `again` says what the second time differed in from the first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from about import gpu, result_file
from serving import add_kv, environment, log_of, make_parser, settings, sglang_flags
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoTokenizer

from sglang_pat.demo.server import Server

BENCHMARKS = {
    "accuracy": {
        "what": "perplexity and greedy answers of a trained model",
        "gpu": True,
        "inputs": "--model FOLDER --texts FILE",
        "results": "accuracy-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

PAGE = 64
"""Texts are shared in whole pages, those of KV of few bits too (packing/spec.py)."""
LIKELIEST = 20
"""How many tokens of a step are known, to find how far behind another server's choice was. What is not among them counts as the last of them."""

Ids = list[int]


class Forced(CustomLogitProcessor):
    """Chooses the tokens that a request names, and tells how likely each was: its logit becomes 1, that of another token the log-probability
    that it had, and all others are impossible. The difference of the two log-probabilities that the server then reports is 1 less that."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        # SGLang sends this class by value, so its names must be in here.
        import torch

        for row, request in zip(logits, custom_param_list, strict=True):
            # SGLang may not know the last tokens yet, as it plans ahead; it calls once for each.
            step = request["step"] = request.get("step", -1) + 1
            token = request["tokens"][min(step, len(request["tokens"]) - 1)]
            logprob = torch.log_softmax(row.float(), -1)[token]
            row.fill_(float("-inf"))
            row[token] = 1
            row[1 if token == 0 else 0] = logprob
        return logits


class Part(NamedTuple):
    """A prompt, and what follows it in the text."""

    prompt: Ids
    following: Ids


class Answer(NamedTuple):
    """Greedy tokens, and of each step the log-probabilities of the likeliest tokens by id."""

    ids: Ids
    likeliest: list[dict[int, float]]


def parts_of(text: Ids, shared: int, requests: int, steps: int) -> list[Part]:
    """Where steps are whole pages, all of a prompt but its last token is in the cache, which keeps whole pages."""
    starts = [shared + 1 + number * steps for number in range(requests)]
    return [Part(text[:start], text[start : start + steps + 1]) for start in starts]


def prefilled(server: Server, text: Ids, shared: int, requests: int, steps: int) -> list[float]:
    """Log-probabilities, by prefill, of the tokens that `decoded` gives. Leaves the text in the cache."""
    first, count = shared + 2, requests * steps
    body = {
        "input_ids": text[: first + count],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": first - 1,
    }
    found = server.post("/generate", body)["meta_info"]["input_token_logprobs"][-count:]
    if [token for _, token, *_ in found] != text[first : first + count]:
        raise RuntimeError("SGLang gave the log-probabilities of other tokens than those of the text")
    return [logprob for logprob, *_ in found]


def decoded(server: Server, parts: Sequence[Part]) -> list[float]:
    """Log-probabilities, by decode steps of all parts at once, of what follows the first token of each."""
    for part in parts:
        # With windows, what is in front of a prompt's last window may have left the cache.
        server.post("/generate", {"input_ids": part.prompt, "sampling_params": {"max_new_tokens": 1}})
    body = {
        "input_ids": [part.prompt for part in parts],
        "sampling_params": [
            {
                "max_new_tokens": len(part.following),
                "temperature": 0,
                "ignore_eos": True,
                "custom_params": {"tokens": part.following},
            }
            for part in parts
        ],
        "custom_logit_processor": Forced.to_str(),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    logprobs = []
    for part, result in zip(parts, server.post("/generate", body, timeout=3600), strict=True):
        if result["output_ids"] != part.following:
            raise RuntimeError("the server decoded other tokens than it was told to")
        cached = result["meta_info"]["cached_tokens"]
        if cached < len(part.prompt) - PAGE:
            raise RuntimeError(f"{cached} of {len(part.prompt)} tokens of a prompt were cached: give it more memory")
        for (chosen, *_), (other, *_) in result["meta_info"]["output_top_logprobs"][1:]:
            logprobs.append(other - chosen + 1)
    return logprobs


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def questions(texts: Sequence[Ids], shared: int, count: int, encode: Any) -> list[Ids]:
    """Prompts: the beginning of one of two texts, and a question about what follows there."""
    prompts = []
    for number in range(count):
        text = texts[number % min(2, len(texts))]
        quoted = text[shared + 24 * (number // 2) :][:24]
        prompts.append(text[:shared] + encode('\n\nQuestion: what does "') + quoted + encode('" mean?\nAnswer:'))
    return prompts


def answered(server: Server, prompts: Sequence[Ids], shared: int, tokens: int) -> list[Answer]:
    """Greedy answers to all prompts at once, behind their documents in the cache."""
    for document in {tuple(prompt[:shared]) for prompt in prompts}:
        server.post("/generate", {"input_ids": list(document), "sampling_params": {"max_new_tokens": 1}})
    body = {
        "input_ids": list(prompts),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": LIKELIEST,
    }
    return [
        Answer(
            result["output_ids"],
            [{token: logprob for logprob, token, *_ in step} for step in result["meta_info"]["output_top_logprobs"]],
        )
        for result in server.post("/generate", body, timeout=3600)
    ]


def leads(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    """Of each answer that is another one: how much likelier the expected token was where they part, in log-probabilities."""
    found = []
    for answer, right in zip(answers, expected, strict=True):
        for token, chosen, likeliest in zip(answer.ids, right.ids, right.likeliest, strict=True):
            if token != chosen:
                found.append(likeliest[chosen] - likeliest.get(token, min(likeliest.values())))
                break
    return found


def parting(answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, Any]:
    found = leads(answers, expected)
    return {
        "answers_equal": len(answers) - len(found),
        "answers": len(answers),
        "largest_lead_where_they_part": round(max(found, default=0), 4),
    }


class Job(msgspec.Struct):
    """What every server is asked."""

    texts: list[Ids]
    shared: int
    requests: int
    steps: int
    prompts: list[Ids]
    document: int
    tokens: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Job:
        """
        Raises:
            SystemExit: The texts are too short.
        """
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        texts = [tokenizer(path.read_text()).input_ids for path in options.texts]
        document = options.document // PAGE * PAGE
        needed = max(options.shared + 2 + options.requests * options.steps, document + 24 * (options.answers // 2 + 1))
        for path, text in zip(options.texts, texts, strict=True):
            if len(text) < needed:
                raise SystemExit(f"--texts: {path} has {len(text):,} tokens, and {needed:,} are needed")

        def encode(words: str) -> Ids:
            return tokenizer(words, add_special_tokens=False).input_ids

        prompts = questions(texts, document, options.answers, encode)
        return cls(texts, options.shared, options.requests, options.steps, prompts, document, options.tokens)


def measure(server: Server, job: Job) -> tuple[dict[str, Any], list[Answer]]:
    """A record but for the comparison with another server, and the answers."""
    by_prefill = [one for text in job.texts for one in prefilled(server, text, job.shared, job.requests, job.steps)]
    before = packing(server)
    runs = [
        [one for text in job.texts for one in decoded(server, parts_of(text, job.shared, job.requests, job.steps))]
        for _ in range(2)
    ]
    after = packing(server)
    first, second = (answered(server, job.prompts, job.document, job.tokens) for _ in range(2))
    record = {
        "tokens": len(by_prefill),
        "perplexity": round(perplexity(runs[0]), 4),
        "prefill_perplexity": round(perplexity(by_prefill), 4),
        "again": {"perplexity": round(perplexity(runs[1]), 4), **parting(second, first)},
    }
    if after is not None and before is not None:
        read, unpacked = (after[name] - before[name] for name in ("kv_bytes", "kv_bytes_unpacked"))
        if not unpacked:
            raise RuntimeError(f"PAT ran no step: {after['unpacked_because'] or 'another backend decoded'}")
        record["kv_read"] = round(read / unpacked, 3)
        if after["fallbacks"] or after["faults"]:
            raise RuntimeError(f"{after['fallbacks']} steps fell back, {after['faults']} faults")
    return record, first


def packing(server: Server) -> dict[str, Any] | None:
    """PAT's counters, of another backend none."""
    try:
        return server.counters()
    except KeyError:
        return None


def main() -> None:
    parser = make_parser(__doc__, result_file("accuracy"))
    parser.add_argument(
        "--texts", type=Path, nargs="+", required=True, help="text files: of each the first tokens count"
    )
    parser.add_argument(
        "--shared", type=int, default=2048, help="tokens of a text in front of what is decoded (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=32, help="that decode a text at once (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=PAGE, help="that each of them decodes (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=48, help="greedy ones (default: %(default)s)")
    parser.add_argument(
        "--document", type=int, default=2944, help="tokens in front of a question (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add_kv(parser)
    parser.set_defaults(kv=["bfloat16"])
    options = parser.parse_args()
    if options.shared % PAGE:
        raise SystemExit(f"--shared is whole pages of {PAGE} tokens")
    job = Job.of(options)
    on_cpu = not torch.cuda.is_available()
    result: dict[str, Any] = {"device": gpu(), "records": []}
    if options.output.exists():
        kept = json.loads(options.output.read_text())["records"]
        result["records"] = [record for record in kept if record["model"] != options.model.name]
    expected: list[Answer] = []
    for backend, kv in settings(options):
        flags = [
            "--enable-custom-logit-processor", "--max-running-requests", str(max(options.requests, options.answers)), *sglang_flags(options, kv)
        ]  # fmt: skip
        log = log_of(options, backend, kv)
        with Server(options.model, backend, log, flags, environment(kv), on_cpu=on_cpu) as server:
            server.wait()
            record, answers = measure(server, job)
        expected = expected or answers
        record = {"model": options.model.name, "backend": backend, "kv": kv, **record, **parting(answers, expected)}
        result["records"].append(record)
        print(json.dumps(record), flush=True)
        # After each one: a run that is cut short keeps what it has.
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
