"""Times the forward kernel on plans with tiles of one kind, and fits the prices of a table to it: for `sglang_pat.tune`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, PackConfig, Plan, WorkItem, devices, layout
from sglang_pat.packing.cost import PARTIAL_BYTES
from sglang_pat.packing.devices import GpuTable, Price
from sglang_pat.packing.spec import LOW_BIT_PAGE

if TYPE_CHECKING:
    from sglang_pat.kernels.arguments import KvView

PRICED = ("bfloat16", capabilities.FP8["fp8_e4m3"], "int4", "int2")
"""Formats of KV that are measured; `devices.PRICES` says who else has their prices."""

GROUP = 4
"""Query heads of the one KV head that is measured, as in Llama 3 8B and Qwen 3 8B."""

ITEMS = {True: (12, 24, 48), False: (2, 4, 8)}
"""How many work items of a worker are timed: narrow ones (the key is True) on its 4, 6 or 12 warps, wide ones one after another."""

TOKENS = (32, 64, 128, 256, 512)
"""Of a work item; pages of few bits are not cut, so with these only whole ones."""

H200 = devices.load(devices.TABLES / "h200.json")
"""The table whose factors (how much prices count in plans) were fitted; other tables copy them. Of eight sets plans ran best with this one, 1 to 10 %
faster than with the plain prices (benchmarks/notes/prices.md, "Prices for each tile"). Of turns priced at 0, 3, 5, 6 and 9 us plans ran best with 3;
1.64 are measured (benchmarks/notes/prices.md, "A turn from wide to narrow items")."""


def synthetic(m: int, items: int, tokens: int, workers: int) -> Plan:
    """A plan in which every worker has the given (even) number of work items of an m. Each item reads `tokens` tokens of its own; each query has GROUP
    rows and is in two items."""
    queries = m // GROUP
    work: list[WorkItem] = []
    for i in range(workers * items):
        first = i // 2 * queries
        rows = list(range(first, first + queries))
        work.append(WorkItem(i * tokens, (i + 1) * tokens, rows, [i % 2] * queries, m))
    batch = workers * items // 2 * queries
    bins = [worker * items for worker in range(workers + 1)]
    return Plan(work, bins, [2] * batch, 1, len(work) * tokens)


def spec_of(head_dim: int, kv: str) -> AttentionSpec:
    """What is measured for a head dimension: that of latents (MLA) stands for them, and that of K wider than V for both."""
    latent = dict(capabilities.LATENT_DIMS).get(head_dim)
    v_dim = latent or dict(capabilities.UNEQUAL_HEAD_DIMS).get(head_dim, head_dim)
    return AttentionSpec(GROUP, 1, head_dim, v_dim, FORMATS[kv], latent=latent is not None)


def fitted(spec: AttentionSpec, m: int) -> Price:
    """A price with the factors of an H200's table of the head dimension, else of its usual one; those of latents are not taken over."""
    known = () if spec.latent else (devices.find("", H200.gpu, spec.head_dim) or H200).prices_of(spec.kv)
    return next((price for price in known if price.m == m), Price(m, 0, 0, 1, 1))


class Bench:
    """Runs synthetic plans on this machine's GPU."""

    def __init__(self, head_dim: int, dtype: str, kv: str) -> None:
        import torch

        from sglang_pat.kernels import cuda

        self.torch, self.dtype = torch, getattr(torch, dtype)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.spec = spec_of(head_dim, kv)
        tiles = capabilities.tile_table_of(self.spec, cuda.arch_of(self.device))
        self.decoder = cuda.Decoder(self.spec, tiles, self.device, dtype=self.dtype)
        self.config = PackConfig.of(self.spec, tiles, self.decoder.workers)
        self.flush = torch.zeros(64 << 20, device=self.device)

    def time_us(self, run: Callable[[], Any], repeats: int = 7) -> float:
        """The median time of `run`, with a cold L2 cache."""
        cuda = self.torch.cuda
        times = []
        for _ in range(repeats + 1):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            self.flush.sum()  # by reading (benchmarks/notes/tests-and-faults.md, "How kernels are timed")
            begin.record()
            run()
            end.record()
            cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[1:])

    def read_tbps(self) -> float:
        numbers = self.torch.zeros(1 << 30, device=self.device)
        return numbers.nbytes / self.time_us(numbers.sum) * 1e-6

    def pool(self, kv_tokens: int) -> tuple[KvView, Any]:
        """Random KV, and the slots of the tokens, [1, kv_tokens]."""
        from sglang_pat.kernels import low_bit
        from sglang_pat.kernels.arguments import KvView

        torch, dim, v_dim = self.torch, self.spec.head_dim, self.spec.v_head_dim
        if self.spec.kv.layout == "plain":
            kept = getattr(torch, self.spec.kv.name)
            k = torch.randn(kv_tokens, 1, dim, device=self.device).to(kept)
            v = k[..., :v_dim] if self.spec.latent else torch.randn(kv_tokens, 1, v_dim, device=self.device).to(kept)
            return KvView(k, v), torch.randperm(kv_tokens, device=self.device, dtype=torch.int32)[None]
        size = LOW_BIT_PAGE
        # Nothing is in tails: items are whole pages.
        tails = torch.zeros(2, size, 1, dim, device=self.device, dtype=self.dtype)
        k, v = torch.randn(2, 64, size, 1, dim)
        some = low_bit.pack(k, v, self.spec.kv.bits).to(self.device)
        pages = torch.randperm(kv_tokens // size, device=self.device, dtype=torch.int32)
        slots = size * pages[:, None] + torch.arange(size, device=self.device, dtype=torch.int32)
        records = some[torch.arange(len(pages)) % len(some)]
        return KvView(tails[0], tails[1], pages=low_bit.Pages(records, self.spec.kv.bits, None)), slots.reshape(1, -1)

    def forward_us(self, m: int, items: int, tokens: int) -> float:
        from sglang_pat.kernels.arguments import Scores, Tables

        torch, workers, dim, v_dim = self.torch, self.decoder.workers, self.spec.head_dim, self.spec.v_head_dim
        plan = synthetic(m, items, tokens, workers)
        batch, kv_tokens = len(plan.num_parts), plan.kv_tokens
        data = torch.from_numpy(layout.flatten(plan)).to(self.device)
        q = torch.randn(batch, GROUP, dim, device=self.device).to(self.dtype)
        kv, table = self.pool(kv_tokens)
        rows = torch.zeros(batch, dtype=torch.int64, device=self.device)
        seq_lens = torch.full_like(rows, kv_tokens)
        partial = torch.empty(2 * batch, GROUP, v_dim, dtype=torch.float16, device=self.device)
        lse = torch.empty(2 * batch, GROUP, device=self.device)
        out = torch.empty_like(q[..., :v_dim])
        tables, scores = Tables(table, rows, seq_lens), Scores(dim**-0.5)
        return self.time_us(lambda: self.decoder.decode(q, kv, tables, scores, out, data, partial, lse, merge=False))

    def price(self, m: int, share: float) -> tuple[Price, float]:
        """The price of an m, if an SM moves `share` bytes per nanosecond, and the greatest relative error of the fit."""
        lengths = [tokens for tokens in TOKENS if tokens % self.config.grain == 0]
        cases = [
            (items, tokens)
            for items in ITEMS[m <= capabilities.NARROW_M and not self.spec.latent]
            for tokens in lengths
        ]
        times = np.array([self.forward_us(m, items, tokens) for items, tokens in cases])
        features = np.array([[1, items, items * tokens] for items, tokens in cases], dtype=float)
        fit = np.linalg.lstsq(features / times[:, None], np.ones(len(times)), rcond=None)[0]
        error = float(np.abs(features @ fit / times - 1).max())
        for case, time in zip(cases, times, strict=True):
            print(f"  m {m:3}: {case[0]:3} items of {case[1]:3} tokens a worker take {time:7.1f} us", flush=True)
        writing = m * (self.spec.v_head_dim + 1) * PARTIAL_BYTES / share
        item_ns, token_ns = round(max(0.0, float(fit[1]) * 1e3 - writing), 1), round(float(fit[2]) * 1e3, 2)
        return msgspec.structs.replace(fitted(self.spec, m), item_ns=item_ns, token_ns=token_ns), error

    def prices(self, share: float) -> tuple[Price, ...]:
        """The price of each m."""
        prices = []
        for m in self.config.tiles.query_tiles:
            price, error = self.price(m, share)
            prices.append(price)
            print(
                f"m {m}, KV of {self.spec.kv.bits} bits: {price.item_ns:.0f} ns an item, {price.token_ns:.1f} ns a token, "
                f"fitted within {error:.0%}"
            )
        return tuple(prices)


def measure(head_dim: int, dtype: str, only: Collection[int] = ()) -> GpuTable:
    """The table of this machine's GPU.

    Args:
        head_dim: The head dimension to measure with, one of `capabilities.HEAD_DIMS`, or K's of LATENT_DIMS.
        dtype: Dtype of Q and of 16-bit KV.
        only: Bits of KV, less than 16; everything else is then taken from the table that the GPU has.

    Raises:
        ValueError: `only` is given, and the GPU has no table.
    """
    import torch

    from sglang_pat.kernels import cuda

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    source = f"measured on {date.today().isoformat()} by `python -m sglang_pat.tune`, torch {torch.__version__}"
    if only:
        table = devices.find(cuda.arch_of(device), properties.name, head_dim)
        if table is None or table.head_dim != head_dim:
            raise ValueError(f"{properties.name} has no table for a head dimension of {head_dim}: measure all of it")
        source = f"{table.source}; prices with KV of {' and '.join(map(str, only))} bits {source}"
        share = table.read_tbps * 1e3 / table.sms
    else:
        bench = Bench(head_dim, dtype, dtype)
        tbps = bench.read_tbps()
        print(f"{properties.name}: reads {tbps:.2f} TB/s")
        share = tbps * 1e3 / properties.multi_processor_count
        table = GpuTable(
            properties.name, properties.multi_processor_count, round(tbps, 3), head_dim, bench.prices(share), source,
            H200.bin_ns, H200.wave_ns, turn_in_plans_ns=H200.turn_in_plans_ns,
        )  # fmt: skip
        # Above the dimension that it was fitted with, a CTA has other warps (csrc/cuda/threads.cuh).
        if head_dim <= H200.head_dim:
            table = msgspec.structs.replace(table, slice_token_ns=H200.slice_token_ns)
        if head_dim <= H200.head_dim and cuda.arch_of(device).startswith("9."):
            # Elsewhere wide tiles have other kernels.
            table = msgspec.structs.replace(
                table, wide_steps=H200.wide_steps, narrow_first_ns=H200.narrow_first_ns,
                slice_token_8bit_ns=H200.slice_token_8bit_ns, splits=H200.splits, splits_8bit=H200.splits_8bit,
            )  # fmt: skip
    for name in PRICED[1:]:
        bits = FORMATS[name].bits
        if only and bits not in only:
            continue
        spec = spec_of(head_dim, name)
        problem = capabilities.refusal(spec, "cuda") or (
            capabilities.pages_problem(spec, cuda.arch_of(device)) if spec.kv.layout == "pages" else None
        )
        if problem is not None:
            print(f"KV of {bits} bits: not measured, as the CUDA kernels do not compute {problem}")
        else:
            table = msgspec.structs.replace(table, **{devices.PRICES[name]: Bench(head_dim, dtype, name).prices(share)})
    return msgspec.structs.replace(table, source=source)
