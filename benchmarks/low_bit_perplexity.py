"""What a KV cache of few bits makes of a trained model's perplexity, and what other schemes would: transformers on a CPU, no server, no kernel.

    python benchmarks/low_bit_perplexity.py --model SMOLLM2 --texts PAPER... --output benchmarks/results/low_bit_perplexity.json
    python benchmarks/low_bit_perplexity.py --model SMOLLM2 --texts PAPER --schemes 'bfloat16' 'int2' 'int2, first page 16 bits'
    python benchmarks/low_bit_perplexity.py --model SMOLLM2 --texts PAPER --tokens 1024 --find-layers 5

Each query sees what a server with `SGLANG_PAT_KV` shows it: full pages of 64 tokens as they were quantised, its own too if its token completes it, and
what is behind them as it was computed. `int4` and `served` (which is `SGLANG_PAT_KV=int2`) are quantised by `sglang_pat.kernels.low_bit`; other schemes
exist here only: `int2` is what 2 bits were before scales and zeros were fitted. All run in float32 on the model's weights. `--find-layers` tells which layers `SGLANG_PAT_INT4_LAYERS` should name: each alone is in 2 bits. Bits are those that a page takes, parameters included, over its elements, averaged over the text's pages:
what is kept in 16 bits counts, the unfinished page of a request does not.

Sources: sinks in 16 bits, Xiao et al., StreamingLLM; K by channel and V by token in groups, KIVI, with its window of recent tokens;
rotations by a Hadamard matrix, QuaRot; ranges that are searched or fitted, as of weights (OmniQuant's clipping, HQQ's alternation).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import torch
from about import about
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from sglang_pat.backend.kv.rotation import Rotation
from sglang_pat.kernels import low_bit

BENCHMARKS = {
    "low-bit-perplexity": {
        "what": "schemes for few bits, a trained model",
        "inputs": "--model FOLDER --texts FILE",
        "results": "low_bit_perplexity.json",
    },
}
"""For run.py, which reads it without importing this file."""

PAGE = low_bit.PAGE_TOKENS
WORST = (17, 18, 20, 23, 24)
"""SmolLM2's layers of which 2 bits cost most, each alone ("int2 in layer 17 only", 2026-11-29)."""
Quantiser = Callable[[torch.Tensor], torch.Tensor]
"""K or V of full pages, [kv_heads, pages, 64, head_dim] in float32, and what is left of it."""


class Scheme(msgspec.Struct, frozen=True):
    """
    Attributes:
        k, v: How pages are quantised; None: not at all.
        k_bits, v_bits: Of an element of theirs.
        first: So many pages at the beginning are kept as `first_as` keeps them, or as they are.
        recent: So many before the unfinished one too. A server cannot have it: what another request put into the cache is there in few bits only.
        layers: Which are quantised so, by number; None: all. The rest as `others`.
    """

    k: Quantiser | None = None
    v: Quantiser | None = None
    k_bits: float = 16
    v_bits: float = 16
    first: int = 0
    first_as: Scheme | None = None
    recent: int = 0
    layers: Collection[int] | None = None
    others: Scheme | None = None

    def of(self, layer: int) -> Scheme:
        return self if self.layers is None or layer in self.layers else self.others or Scheme()

    def bits(self, layers: int, pages: int) -> float:
        """Of an element, averaged over layers, K and V, and the pages of a text."""
        total = 0.0
        for one in map(self.of, range(layers)):
            first = one.first_as or Scheme()
            total += (
                one.k_bits + one.v_bits + one.first / pages * (first.k_bits + first.v_bits - one.k_bits - one.v_bits)
            )
        return total / 2 / layers


def uniform(
    bits: int, axis: int, group: int, fit: int = 0, shrink: bool = False, dtype: torch.dtype = torch.float16
) -> Quantiser:
    """Codes of a scale, of a dtype, and a zero in fp16 for each `group` numbers along an axis: -2 are tokens (so each channel has its own), -1 channels.

    Args:
        bits, axis, group: As above.
        fit: So often the scale and the zero are fitted to the codes by least squares, and the codes chosen anew.
        shrink: The range is narrowed by what errs least of some factors.
        dtype: Of 8 bits is 1 / 16 of a scale.
    """
    most, unit = 2**bits - 1, 1 if dtype == torch.float16 else 1 / 16

    def quantised(x: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zero, scale = zero.half().float(), (scale / unit).to(dtype).float() * unit
        codes = torch.where(scale > 0, (x - zero) / scale, 0).nan_to_num().round().clamp(0, most)
        return codes, zero + scale * codes

    def run(x: torch.Tensor) -> torch.Tensor:
        parts = x.transpose(axis, -1).unflatten(-1, (-1, group))
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        codes, best = quantised(parts, low, (high - low.half().float()) / most)
        if shrink:
            error = (best - parts).square().sum(-1, keepdim=True)
            for factor in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5):
                cut = (high - low) * (1 - factor) / 2
                other, found = quantised(parts, low + cut, (high - low - 2 * cut) / most)
                its = (found - parts).square().sum(-1, keepdim=True)
                codes, best = torch.where(its < error, other, codes), torch.where(its < error, found, best)
                error = torch.minimum(error, its)
        for _ in range(fit):
            mean_code, mean = codes.mean(-1, keepdim=True), parts.mean(-1, keepdim=True)
            spread = (codes - mean_code).square().sum(-1, keepdim=True)
            scale = ((codes - mean_code) * (parts - mean)).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
            codes, best = quantised(parts, mean - scale * mean_code, scale)
        return best.flatten(-2).transpose(axis, -1)

    return run


def of_server(bits: int, is_v: bool) -> Quantiser:
    """What the server keeps."""

    def run(x: torch.Tensor) -> torch.Tensor:
        pages = x.permute(1, 2, 0, 3).contiguous()
        found = low_bit.unpack(low_bit.pack(pages, pages, bits), bits, x.shape[-1])[is_v]
        return found.permute(2, 0, 1, 3)

    return run


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def rotated(quantiser: Quantiser) -> Quantiser:
    """Of K with Q rotated too, or of V with what follows: here it is rotated back, which is the same."""

    def run(x: torch.Tensor) -> torch.Tensor:
        rotation = Rotation(x.shape[-1], torch.float32, "cpu")
        return rotation.output(quantiser(rotation.stored(x)))

    return run


def before_rope(quantiser: Quantiser, frequencies: torch.Tensor) -> Quantiser:
    """Of K as it was before the rotation by its position, of `frequencies` [head_dim / 2], whose halves of channels are pairs."""

    def run(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1] * PAGE, dtype=torch.float32).unflatten(0, (-1, PAGE))
        turns = torch.polar(torch.ones(1), positions[..., None] * frequencies)
        pairs = torch.complex(*x.contiguous().chunk(2, -1)) * turns.conj()
        kept = torch.complex(*quantiser(torch.cat([pairs.real, pairs.imag], -1)).contiguous().chunk(2, -1)) * turns
        return torch.cat([kept.real, kept.imag], -1)

    return run


def schemes(dim: int, layers: int, frequencies: torch.Tensor, worst: Collection[int] = WORST) -> dict[str, Scheme]:
    """By name. `dim`: of a head; `worst`: layers that some schemes keep in 4 bits."""
    k2, v2 = uniform(2, -2, PAGE), uniform(2, -1, dim)
    channels, tokens = 2 + 32 / PAGE, 2 + 32 / dim  # bits of an element of K and of V, as int2 has them
    fitted_k, fitted_v = uniform(2, -2, PAGE, fit=8), uniform(2, -1, dim, fit=8)
    plain, fitted = Scheme(k2, v2, channels, tokens), Scheme(fitted_k, fitted_v, channels, tokens)
    four = Scheme(of_server(4, False), of_server(4, True), channels + 2, tokens + 2)
    k3_short = Scheme(
        uniform(3, -2, PAGE, fit=8, dtype=torch.float8_e4m3fn), uniform(2, -1, dim, fit=8, dtype=torch.float8_e4m3fn),
        3 + 24 / PAGE, 2 + 24 / dim,
    )  # fmt: skip
    change = msgspec.structs.replace
    turned = change(fitted, k=rotated(fitted_k), v=rotated(fitted_v))
    served, served_four = (
        change(of, k=rotated(of_server(bits, False)), v=rotated(of_server(bits, True)))
        for bits, of in ((2, plain), (4, four))
    )
    rest = [number for number in range(layers) if number not in worst]
    return {
        "bfloat16": Scheme(),
        "fp8_e4m3 without scales": Scheme(fp8, fp8, 8, 8),
        "int4": four,
        "int2": plain,
        # the server's
        "served": served,
        "served, five layers int4": change(served, layers=rest, others=served_four),
        **{f"served in layer {number} only": change(served, layers=[number]) for number in range(layers)},
        # why
        "int2, K only": change(plain, v=None, v_bits=16),
        "int2, V only": change(plain, k=None, k_bits=16),
        "int2, V int4": change(plain, v=four.v, v_bits=four.v_bits),
        "int2, K int4": change(plain, k=four.k, k_bits=four.k_bits),
        **{
            f"int2 in layers {begin} to {begin + 4} only": change(plain, layers=range(begin, begin + 5))
            for begin in range(0, layers, 5)
        },
        **{f"int2 in layer {number} only": change(plain, layers=[number]) for number in range(layers)},
        # what a server cannot have: another request's recent tokens are in the cache in few bits only
        "int2, the last page 16 bits too": change(plain, recent=1),
        # the same pages, other parameters
        "int2, shrunk": Scheme(uniform(2, -2, PAGE, shrink=True), uniform(2, -1, dim, shrink=True), channels, tokens),
        "int2, fitted": fitted,
        "int2, fitted, K rotated": change(fitted, k=rotated(fitted_k)),
        "int2, fitted, both rotated": turned,
        # pages of two kinds
        "int2, first page 16 bits": change(plain, first=1),
        "int2, first page int4": change(plain, first=1, first_as=four),
        "int2, fitted, first page int4": change(fitted, first=1, first_as=four),
        "int2, fitted, both rotated, first page int4": change(turned, first=1, first_as=four),
        "int2, fitted, both rotated, five layers int4": change(turned, layers=rest, others=four),
        "int2, fitted, both rotated, first page and five layers int4": change(
            turned, first=1, first_as=four, layers=rest, others=four
        ),
        # other pages
        "int2, K rotated": change(plain, k=rotated(k2)),
        "int2, V rotated": change(plain, v=rotated(v2)),
        "int2, K rotated, by token": change(plain, k=rotated(uniform(2, -1, dim)), k_bits=tokens),
        "int2, K by 32 tokens": change(plain, k=uniform(2, -2, 32), k_bits=3),
        "int2, K by 32 tokens, first page 16 bits": change(plain, k=uniform(2, -2, 32), k_bits=3, first=1),
        "int2, fitted, both rotated, K by 32 tokens, first page int4": change(
            turned, k=rotated(uniform(2, -2, 32, fit=8)), k_bits=3, first=1, first_as=four
        ),
        "int2, K before RoPE": change(plain, k=before_rope(k2, frequencies)),
        "int2, fitted, K before RoPE, first page int4": change(
            fitted, k=before_rope(fitted_k, frequencies), first=1, first_as=four
        ),
        "K 3 bits, V 2, fitted, both rotated, scales of 8 bits, first page int4": change(
            k3_short, k=rotated(k3_short.k or fp8), v=rotated(k3_short.v or fp8), first=1, first_as=four
        ),
    }


class Attention:
    """Attention of one scheme, in place of the model's own."""

    def __init__(self) -> None:
        self.scheme = Scheme()

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Of one text; q [1, heads, tokens, dim], k and v likewise with KV heads. Returns [1, tokens, heads, dim]."""
        scheme, tokens = self.scheme.of(module.layer_idx), q.shape[2]
        q, k, v = q[0] * scaling, k[0], v[0]
        heads, pages, out = k.shape[0], tokens // PAGE, torch.empty_like(q)
        group = q.shape[0] // heads
        kept, first = [], scheme.first_as or Scheme()
        for x, quantiser, at_first in ((k, scheme.k, first.k), (v, scheme.v, first.v)):
            in_pages = x[:, : pages * PAGE].unflatten(1, (pages, PAGE))
            found = in_pages.clone() if quantiser is None else quantiser(in_pages).contiguous()
            begin = in_pages[:, : scheme.first]
            found[:, : scheme.first] = begin if at_first is None or not scheme.first else at_first(begin)
            kept.append(found.flatten(1, 2))
        for full_pages in range(pages + 1):
            # Those that see so many full pages: the last of them completes the next one, and so sees one more.
            begin, end = max(0, full_pages * PAGE - 1), min(tokens, full_pages * PAGE + PAGE - 1)
            if begin >= end:
                continue
            edge = full_pages * PAGE
            few = max(0, full_pages - scheme.recent) * PAGE
            seen_k, seen_v = (torch.cat([of[:, :few], x[:, few:end]], 1) for of, x in zip(kept, (k, v), strict=True))
            mine = q[:, begin:end].reshape(heads, group * (end - begin), -1)
            scores = (mine @ seen_k.transpose(1, 2)).unflatten(1, (group, end - begin))
            positions = torch.arange(begin, end)
            scores[..., edge:].masked_fill_(torch.arange(edge, end) > positions[:, None], -math.inf)
            found = scores.softmax(-1).flatten(1, 2) @ seen_v
            out[:, begin:end] = found.unflatten(1, (group, end - begin)).flatten(0, 1)
        return out.transpose(0, 1)[None], None


def negative_log_likelihood(model: Any, ids: torch.Tensor) -> float:
    """The mean over all tokens but the first, in nats."""
    hidden = model.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
    total = 0.0
    for part, right in zip(hidden.split(512), ids[1:].split(512), strict=True):
        total += torch.nn.functional.cross_entropy(model.lm_head(part).float(), right, reduction="sum").item()
    return total / (len(ids) - 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of Llama's architecture, trained")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text (default: %(default)s)")
    parser.add_argument("--schemes", nargs="+", help="only these")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=WORST, help='what "five layers" are (default: SmolLM2\'s)'
    )
    parser.add_argument(
        "--find-layers", type=int, metavar="COUNT", help="look for as many layers that cost most in 2 bits"
    )
    parser.add_argument(
        "--output", type=Path, help="where to write the results as JSON; schemes that are there are kept"
    )
    options = parser.parse_args()

    attention = Attention()
    AttentionInterface.register("few_bits", attention)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="few_bits")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [torch.tensor(tokenizer(path.read_text()).input_ids[: options.tokens]) for path in options.texts]
    if any(len(ids) < options.tokens for ids in texts):
        raise SystemExit(f"--texts: each must have {options.tokens} tokens")
    config = model.config
    layers = config.num_hidden_layers
    dim = config.hidden_size // config.num_attention_heads
    known = schemes(dim, layers, model.model.rotary_emb.inv_freq, options.layers)
    alone = {f"served in layer {number} only": number for number in range(layers)}
    names = options.schemes or list(alone if options.find_layers else known)
    if unknown := set(names) - set(known):
        raise SystemExit(f"--schemes: there is no {', '.join(sorted(unknown))}")
    result: dict[str, Any] = {"about": about(), "tokens": options.tokens, "texts": len(texts), "records": []}
    if options.output and options.output.exists():
        result["records"] = json.loads(options.output.read_text())["records"]
    print("| scheme | bits | perplexity |\n|---|---|---|", flush=True)
    for name in names:
        began = time.monotonic()
        attention.scheme = known[name]
        found = [negative_log_likelihood(model, ids) for ids in texts]
        record = {
            "scheme": name,
            "bits": round(known[name].bits(config.num_hidden_layers, options.tokens // PAGE), 3),
            "perplexity": round(math.exp(sum(found) / len(found)), 3),
            "of_texts": [round(math.exp(one), 3) for one in found],
        }
        print(
            f"| {name} | {record['bits']:.2f} | {record['perplexity']:.2f} | {time.monotonic() - began:.0f} s",
            flush=True,
        )
        result["records"] = [one for one in result["records"] if one["scheme"] != name] + [record]
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.find_layers:
        found_alone = [one for one in result["records"] if one["scheme"] in alone]
        found_alone.sort(key=lambda one: one["perplexity"], reverse=True)
        worst = sorted(alone[one["scheme"]] for one in found_alone[: options.find_layers])
        print(f"SGLANG_PAT_INT4_LAYERS={','.join(map(str, worst))}")


if __name__ == "__main__":
    main()
