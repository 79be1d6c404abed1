"""Single decode steps of SGLang's model runner with each attention backend in turn, without a server around them:

    python benchmarks/steps.py --model MODEL --dummy --backends pat fa3 flashinfer triton
    python benchmarks/steps.py --model MODEL --cells 8x512 8,256_2048,256
    python benchmarks/steps.py --model MODEL --dummy --backends pat --kv fp8_e4m3 int4 int2 --cells 8x32768 128x4096

A cell is BATCHxCONTEXT, where nothing is shared, or a tree of the kernels' benchmark. For each: what a step takes on the GPU;
what the host needs for the metadata of a step in a steady state, and for a new plan; and the kernels and copies of one step.
Prompts are not computed for that: their slots are filled with random numbers once, the same for all backends.

Then the same prompts are decoded greedily with each backend from a real prefill. Printed are how many tokens agree up to the
first that differs, for each two backends, and the greatest difference between their logits after the first step. Weights of
`--dummy` are random and the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import about
import serving
import torch
import trees

from sglang_pat import compat
from sglang_pat.backend.groups import LayerGroup
from sglang_pat.packing import native

CELLS = (
    "1x512", "1x4096", "1x32768", "8x512", "8x4096", "8x32768", "32x512", "32x4096", "128x512", "128x4096", "256x512",
    "8,256_2048,256", "1,32_4096,256",
)  # fmt: skip
PROFILED = ("1x512", "32x512", "256x512", "8,256_2048,256")
AGREEMENT_TREE, AGREEMENT_STEPS = "4,64_1024,200", 48
WARM_UP, STEPS = 4, 16
SLEEP_CYCLES = 4_000_000
"""Two milliseconds in which the GPU waits, so that the host is ahead of it as it is in a server."""


def fill(pool: Any, layer: int) -> None:
    """Random numbers as a layer's KV, none of them infinite."""
    if hasattr(pool, "full_pages"):
        pool.full_pages(layer).random_(0, 0x3C)  # so that parameters, of 16 bits, are less than 1
        for tails in pool.tails(layer):
            tails.normal_()
        return
    for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
        if buffer.element_size() == 1:
            buffer.view(torch.uint8).random_(0, 0x70)  # no NaN in either format of 8 bits
        else:
            buffer.normal_()


class Runner:
    """SGLang's model runner, as its own `sglang.benchmark.one_batch` makes it."""

    def __init__(self, options: argparse.Namespace, backend: str) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.entrypoints.engine import _set_envs_and_config
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        flags = serving.sglang_flags(options, options.kv[0])
        arguments = ["--model-path", str(options.model), "--attention-backend", backend, *flags]
        server_args = ServerArgs.from_cli_args(parser.parse_args(arguments))
        _set_envs_and_config(server_args)
        initialize_moe_config(server_args)
        wrapper, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
        self.one_batch, self.bench, self.runner = one_batch, wrapper, wrapper.torch_runner
        self.backend = self.runner.attn_backend
        self.groups: list[LayerGroup] = self.backend.groups.steps if backend == "pat" else []
        self.device = self.runner.device
        pool = self.runner.token_to_kv_pool
        if options.dummy:
            self.scale_weights()
        torch.manual_seed(0)
        for layer in range(self.runner.model_config.num_hidden_layers):
            fill(pool, layer)

    def scale_weights(self) -> None:
        """SGLang's random weights are so small that attention hardly moves the logits. With these it does, and what each
        layer adds is small enough for rounding not to grow from layer to layer, as after training."""
        layers = self.runner.model_config.num_hidden_layers
        generator = torch.Generator(self.device).manual_seed(0)
        for name, weight in self.runner.model.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = weight.shape[1] * (2 * layers if adds else 1)
                weight.data.normal_(std=scale**-0.5, generator=generator)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.data.fill_(1.5)
            elif name.endswith("norm.weight"):
                weight.data.fill_(1.0)

    def capacity(self) -> int:
        return self.runner.max_total_num_tokens

    def start(self, batch: Any, prefill: bool) -> tuple[Any, torch.Tensor]:
        """The batch, ready to decode, and the tokens that it begins with; requests of a node share its slots."""
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.bench.clear()
        generator = torch.Generator().manual_seed(1)
        vocabulary = min(1000, self.runner.model_config.vocab_size)
        prompts = [torch.randint(vocabulary, (n,), generator=generator) for n in batch.seq_lens]
        nodes = list(batch.roots)
        for node in nodes:
            for query in node.queries:
                prompts[query][node.start : node.end] = prompts[node.queries[0]][node.start : node.end]
            nodes.extend(node.children)
        reqs = []
        for query, prompt in enumerate(prompts):
            req = Req(
                str(query), "", array("q", prompt.tolist()), SamplingParams(temperature=0, max_new_tokens=1 << 20)
            )
            req.full_untruncated_fill_ids = req.origin_input_ids
            req.logprob_start_len = -1
            req.set_extend_range(0, len(prompt))
            reqs.append(req)
        if prefill:
            first, _, schedule = self.bench.extend(reqs)
        else:
            cache = self.one_batch.TreeCacheNamespace(
                page_size=self.runner.server_args.page_size,
                device=self.device,
                token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            )
            schedule = ScheduleBatch.init_new(
                reqs=reqs, req_to_token_pool=self.runner.req_to_token_pool,
                token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator, tree_cache=cache,
                model_config=self.runner.model_config, enable_overlap=False, spec_algorithm=SpeculativeAlgorithm.NONE,
            )  # fmt: skip
            schedule.prepare_for_extend()
            first = torch.randint(vocabulary, (len(reqs),), generator=generator).to(self.device)
        table, rows = self.runner.req_to_token_pool.req_to_token, schedule.req_pool_indices
        for node in nodes:
            members = rows[node.queries]
            table[members, node.start : node.end] = table[members[0], node.start : node.end].clone()
        for group in self.groups:
            group.scheduler.reset()
            native.load(
                group.scheduler, batch, compat.requests.numbers(self.runner.req_to_token_pool, rows.cpu()).tolist()
            )
        return schedule, first

    def step(self, tokens: torch.Tensor, schedule: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens and the logits."""
        return self.bench.decode(tokens, schedule)

    def measure(self, cell: str) -> dict[str, Any] | None:
        batch = trees.of_cell(cell)
        if sum(batch.seq_lens) + 64 * len(batch.seq_lens) > self.capacity():
            print(f"  {cell}: more tokens than the pool's {self.capacity():,}", flush=True)
            return None
        schedule, tokens = self.start(batch, prefill=False)
        forward, metadata = self.runner.forward, self.backend.init_forward_metadata_out_graph
        times: list[tuple[Any, Any]] = []
        host_us: list[float] = []

        def timed_forward(*arguments: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            result = forward(*arguments, **options)
            end.record()
            times.append((begin, end))
            return result

        def timed_metadata(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter_ns()
            result = metadata(*arguments, **options)
            host_us.append((time.perf_counter_ns() - began) / 1e3)
            return result

        gpu = torch.cuda.is_available()
        self.backend.init_forward_metadata_out_graph = timed_metadata
        if gpu:
            self.runner.forward = timed_forward
        record: dict[str, Any] = {"cell": cell, "batch": len(batch.seq_lens), "context": batch.seq_lens[0]}
        try:
            for _ in range(WARM_UP + STEPS):
                tokens, _ = self.step(tokens, schedule)
            self.synchronize()
            if gpu:
                record["step_ms"] = statistics.median(a.elapsed_time(b) for a, b in times[WARM_UP:])
            record["metadata_us"] = statistics.median(host_us[WARM_UP:])
            if self.groups:
                host_us.clear()
                for _ in range(WARM_UP + STEPS // 2):
                    for group in self.groups:
                        group.planner._good = 0
                    tokens, _ = self.step(tokens, schedule)
                    self.synchronize()
                record["metadata_changed_us"] = statistics.median(host_us[WARM_UP:])
                tokens, _ = self.step(tokens, schedule)
        finally:
            self.runner.forward, self.backend.init_forward_metadata_out_graph = forward, metadata
        if cell in PROFILED and gpu:
            record["kernels"] = self.kernels(tokens, schedule)
        return record

    def kernels(self, tokens: torch.Tensor, schedule: Any) -> dict[str, int]:
        """Kernels and copies of one step in a steady state, with how often each ran."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.step(tokens, schedule)
            self.synchronize()
        names = Counter(event.name for event in profile.events() if event.device_type.name == "CUDA")
        return {re.sub(r"^void |<.*|\(.*", "", name)[:80]: count for name, count in names.items()}

    def generate(self) -> dict[str, Any]:
        """Greedy tokens of the agreement's prompts, and the logits of their first step."""
        schedule, tokens = self.start(trees.of_cell(AGREEMENT_TREE), prefill=True)
        streams, first = [tokens.cpu()], None
        for _ in range(AGREEMENT_STEPS):
            tokens, logits = self.step(tokens, schedule)
            first = logits.float().cpu() if first is None else first
            streams.append(tokens.cpu())
        return {"tokens": torch.stack(streams, 1), "logits": first}

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def child(options: argparse.Namespace) -> None:
    """One backend, in a process of its own."""
    began = time.monotonic()
    backend = options.backends[0]
    runner = Runner(options, backend)
    print(f"{backend}: up after {time.monotonic() - began:.0f} s", flush=True)
    records = []
    for cell in options.cells:
        record = runner.measure(cell)
        if record is not None:
            print(
                f"  {cell}: " + ", ".join(f"{k} {v:.3f}" for k, v in record.items() if isinstance(v, float)), flush=True
            )
            records.append({"backend": backend, "kv": options.kv[0], **record})
        options.child.with_suffix(".json").write_text(json.dumps(records))
    torch.save(runner.generate(), options.child)


def compare(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = serving.compare({backend: result["tokens"].tolist() for backend, result in results.items()})
    for row in rows:
        a, b = (results[backend]["logits"] for backend in row["backends"])
        row |= {"max_logit_difference": (a - b).abs().max().item(), "logit_std": a.std().item()}
        print(row, flush=True)
    return rows


def main() -> None:
    parser = serving.make_parser(__doc__, about.result_file("steps"))
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    serving.add_kv(parser)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    device = about.gpu()
    result: dict[str, Any] = {
        "device": device, "model": options.model.name, "records": [], "agreement": [], "agreement_date": device["date"],
    }  # fmt: skip
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend, kv in serving.settings(options):
            to = Path(folder) / f"{backend}-{kv}.pt"
            # The last of an option given twice counts.
            command = [sys.executable, __file__, *sys.argv[1:], "--backends", backend, "--child", str(to)]
            command += ["--kv", kv] if kv else []
            log = serving.log_of(options, backend, kv)
            with log.open("w") as errors:
                environment = {**os.environ, **serving.environment(kv)}
                code = subprocess.run(command, stderr=errors, env=environment, check=False).returncode
            if to.with_suffix(".json").exists():
                result["records"] += json.loads(to.with_suffix(".json").read_text())
            if code:
                print(f"{backend} failed; see {log}", flush=True)
            else:
                log.unlink()
                outcomes[f"{backend} {kv}" if kv else backend] = torch.load(to)
            result["agreement"] = compare(outcomes)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
