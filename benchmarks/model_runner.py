"""SGLang's model runner without a server, for benchmarks: single decode and verify steps of a tree of requests."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from array import array
from collections import Counter
from typing import Any

import serving
import torch
import trees

from sglang_pat import compat
from sglang_pat.backend.groups import LayerGroup
from sglang_pat.packing import native

PROFILED = ("1x512", "32x512", "256x512", "8,256_2048,256")
AGREEMENT_TREE, AGREEMENT_STEPS = "4,64_1024,200", 48
WARM_UP, STEPS = 4, 16
SLEEP_CYCLES = 4_000_000
"""Two milliseconds in which the GPU waits, so that the host is ahead of it as it is in a server."""
EAGER = 50
"""So many times as long before an extend, whose kernels are launched one by one."""


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


def drafts(options: argparse.Namespace) -> list[str]:
    """Flags of SGLang for drafts of `options.tokens` tokens. No draft model is loaded for verify steps; the model stands for one. Without the last
    flag SGLang takes 48 requests."""
    if options.tokens == 1:
        return []
    return [
        "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(options.model), "--speculative-eagle-topk", "1",
        "--speculative-num-steps", str(options.tokens - 1), "--speculative-num-draft-tokens", str(options.tokens),
        "--max-running-requests", "256",
    ]  # fmt: skip


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
        self.tokens, self.new = options.tokens, options.new
        flags = serving.sglang_flags(options, options.kv[0]) + drafts(options)
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

    def vocabulary(self) -> int:
        """How many tokens prompts are made of."""
        return min(1000, self.runner.model_config.vocab_size)

    def capacity(self) -> int:
        return self.runner.max_total_num_tokens

    def start(self, batch: Any, prefill: bool) -> tuple[Any, torch.Tensor]:
        """The batch, ready to decode, and the tokens that it begins with; requests of a node share its slots."""
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.bench.clear()
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.vocabulary()
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
                req_to_token_pool=self.runner.req_to_token_pool,
                disable=False,
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
        """The next tokens and the logits. A verify step accepts no token, and an extend computes the same again: each is like the one before."""
        if self.tokens == 1 and self.new == 0:
            return self.bench.decode(tokens, schedule)
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        with torch.no_grad():
            batch = ForwardBatch.init_new(schedule, self.runner, return_hidden_states_before_norm=False)
            return tokens, self.runner.forward(batch).logits_output.next_token_logits

    def shorten(self, schedule: Any) -> None:
        """Make a batch's prefill that of the last `new` tokens of each request, behind cached ones."""
        size, rows = len(schedule.seq_lens), schedule.req_pool_indices.long()
        cached = schedule.seq_lens.long() - self.new
        places = cached[:, None] + torch.arange(self.new, device=self.device)
        schedule.prefix_lens, schedule.extend_lens = cached.tolist(), [self.new] * size
        schedule.extend_num_tokens, schedule.extend_logprob_start_lens = size * self.new, [0] * size
        schedule.prefill_input_ids_cpu = None
        schedule.input_ids = torch.randint(self.vocabulary(), (size * self.new,), device=self.device)
        schedule.out_cache_loc = self.runner.req_to_token_pool.req_to_token[rows[:, None], places].flatten().long()

    def draft(self, schedule: Any) -> None:
        """Give each request of a batch a draft to verify, as SGLang's EAGLE worker does, of any tokens and without branches."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        size, count = len(schedule.seq_lens), self.tokens
        lengths, offsets = schedule.seq_lens.long(), torch.arange(count, device=self.device)
        slots = self.runner.token_to_kv_pool_allocator.alloc(size * count)
        table = self.runner.req_to_token_pool.req_to_token
        positions = lengths[:, None] + offsets
        table[schedule.req_pool_indices.long()[:, None], positions] = slots.view(size, count).to(table.dtype)
        # A row of flags for each token of each request: all of its KV, and of the draft what is not behind it.
        own = offsets[:, None] >= offsets
        rows = [torch.cat([own.new_ones(count, n), own], 1).flatten() for n in lengths.tolist()]
        links = torch.arange(1, count + 1, device=self.device).repeat(size, 1)
        links[:, -1] = -1
        schedule.input_ids = torch.randint(self.vocabulary(), (size * count,), device=self.device)
        schedule.out_cache_loc, schedule.forward_mode = slots, ForwardMode.TARGET_VERIFY
        schedule.spec_info = EagleVerifyInput(
            draft_token=schedule.input_ids, custom_mask=torch.cat(rows), positions=positions.flatten(),
            retrieve_index=torch.arange(size * count, device=self.device).view(size, count), retrieve_next_token=links,
            retrieve_next_sibling=torch.full_like(links, -1), retrieve_cum_len=None, spec_steps=count - 1, topk=1, draft_token_num=count,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=int(lengths.sum()), seq_lens_cpu=schedule.seq_lens_cpu,
        )  # fmt: skip

    def problem(self, batch: Any) -> str:
        """Why a batch cannot be measured; empty if it can."""
        rows = self.runner.req_to_token_pool.size
        if sum(batch.seq_lens) + 64 * len(batch.seq_lens) > self.capacity():
            return f"more tokens than the pool's {self.capacity():,}"
        if len(batch.seq_lens) > rows:
            return f"more requests than the pool's {rows}"
        return f"requests have fewer than {self.new} tokens" if self.new > min(batch.seq_lens) else ""

    def assert_followed(self, cell: str) -> None:
        """Otherwise PAT shared nothing, and was measured so."""
        if self.groups and self.backend.reporter.counters()["faults"]:
            raise RuntimeError(f"{cell}: its requests are not followed")

    def measure(self, cell: str) -> dict[str, Any] | None:
        batch = trees.of_cell(cell)
        if problem := self.problem(batch):
            print(f"  {cell}: {problem}", flush=True)
            return None
        schedule, tokens = self.start(batch, prefill=False)
        if self.tokens > 1:
            self.draft(schedule)
        elif self.new:
            self.shorten(schedule)
        prepares = "init_forward_metadata" if self.new else "init_forward_metadata_out_graph"
        forward, metadata = self.runner.forward, getattr(self.backend, prepares)
        times: list[tuple[Any, Any]] = []
        host_us: list[float] = []

        def timed_forward(*arguments: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES * (EAGER if self.new else 1))
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
        setattr(self.backend, prepares, timed_metadata)
        if gpu:
            self.runner.forward = timed_forward
        record: dict[str, Any] = {
            "cell": cell, "batch": len(batch.seq_lens), "context": batch.seq_lens[0], "tokens": self.tokens, "new": self.new,
        }  # fmt: skip
        try:
            for _ in range(WARM_UP + STEPS):
                tokens, _ = self.step(tokens, schedule)
                # A server's host is not many steps ahead. Here it was, and waited 9.5 ms, not 0.01, for plans to be copied.
                self.synchronize()
            if gpu:
                record["step_ms"] = statistics.median(a.elapsed_time(b) for a, b in times[WARM_UP:])
            record["metadata_us"] = statistics.median(host_us[WARM_UP:])
            if self.groups and not self.new:
                host_us.clear()
                for _ in range(WARM_UP + STEPS // 2):
                    for group in self.groups:
                        group.planner._good = 0
                    tokens, _ = self.step(tokens, schedule)
                    self.synchronize()
                record["metadata_changed_us"] = statistics.median(host_us[WARM_UP:])
                tokens, _ = self.step(tokens, schedule)
        finally:
            self.runner.forward = forward
            setattr(self.backend, prepares, metadata)
        self.assert_followed(cell)
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
