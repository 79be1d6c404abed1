"""Compiles ahead of time what a server needs on a GPU: `sglang-pat build --model Qwen/Qwen3-8B`, or `--head-dim 128 --dtype bfloat16` without a model.

Run it with the GPU and the kind of CPU of the servers. It fills the folder TVM_FFI_CACHE_DIR, else ~/.cache/tvm-ffi. Servers of other users load what root
made there, or the user that they name in SGLANG_PAT_CACHE_OWNER, if nobody else can write it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import sys

import msgspec
import torch

from sglang_pat import jit, model_config
from sglang_pat.cli import model
from sglang_pat.cli.parser import Parser, run
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import FORMATS, AttentionSpec

PROG = "python -m sglang_pat.build"

DRAFT_HEADS = (1, 8, 32)
"""Query heads of a KV head, of drafts of two tokens with different modules (`capabilities.tiles_for_drafts` and `has_tails`)."""

LEAST_CAPABILITY = 8
"""Of the GPUs that there are kernels for (docs/support.md)."""


def architecture(text: str) -> str:
    """A compute capability as `cuda.arch_of` names it."""
    found = re.fullmatch(r"([0-9]{1,2})\.([0-9])a?", text)
    if found is None or int(found[1]) < LEAST_CAPABILITY:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability of {LEAST_CAPABILITY}.0 or more")
    return capabilities.arch_name(int(found[1]), int(found[2]))


def variants_of(options: argparse.Namespace, arch: str) -> list[cuda.Variant]:
    """The modules of servers with these options.

    Raises:
        ValueError: There are no kernels for one of them.
    """
    found: dict[cuda.Variant, None] = {}
    for name, kv, (dim, v_dim), sinks in itertools.product(
        options.dtype, options.kv_cache_dtype, options.dims, options.sinks_of_layers
    ):
        form = FORMATS[name if kv == "auto" else capabilities.FP8.get(kv, kv)]
        spec = AttentionSpec(1, 1, dim, v_dim, form, sinks=sinks, capped=options.logit_cap, latent=options.latent)
        # With as many query heads of a KV head as a warpgroup has rows, work items may have tails.
        specs = [spec, msgspec.structs.replace(spec, heads=capabilities.WARPGROUP_ROWS)]
        # With nearly as many rows as a tile of latents has, queries may straddle work items.
        straddling = [capabilities.latent_query_tiles(arch)[-1] - 1] if spec.latent else []
        specs += [msgspec.structs.replace(spec, heads=rows) for rows in straddling]
        if options.drafts:
            windows = (0, 1) if options.windows else (0,)
            specs += [
                msgspec.structs.replace(spec, heads=heads, window=window, query_tokens=2)
                for window in windows
                for heads in (*DRAFT_HEADS, *(rows // 2 for rows in straddling))
            ]
        for one in specs:
            # Extends of KV in few bits run over a workspace (backend/extends/low_bit_prefill.py), those of latents on a stock backend; those of drafts are the
            # first two specs'.
            extends = one.query_tokens == 1 and not (form.layout == "pages" or spec.latent)
            made = cuda.variants(
                one, arch, dtype=getattr(torch, name), extends=extends, batch_invariant=options.deterministic
            )
            found.update(dict.fromkeys(made))
    return list(found)


def variants(name: str | None, arch: str) -> list[cuda.Variant]:
    """The modules of a server for a model (as of --model) without drafts, with KV in the model's dtype; of the command's defaults, if None.

    Raises:
        ModelError: There is no such model.
        ValueError: There are no kernels for it.
    """
    options = _parser(PROG).parse_args([] if name is None else ["--model", name])
    _complete(options)
    return variants_of(options, arch)


def _complete(options: argparse.Namespace) -> None:
    """Add what follows from the model's config.json, or from what was given in place of one."""
    options.dims = [(dim, options.v_head_dim or dim) for dim in options.head_dim or [128]]
    options.sinks_of_layers, options.latent = (options.sinks,), False
    if options.model is not None:
        found = model.needs(model_config.read(model_config.find(options.model)))
        options.dims, options.sinks_of_layers, options.latent = found.dims, found.sinks, found.latent
        options.logit_cap, options.windows = found.capped, found.windows
        options.dtype = options.dtype or [found.dtype]
    options.dtype = options.dtype or ["bfloat16"]


def main(arguments: list[str] | None = None, prog: str = PROG) -> int:
    """Run the command; returns the exit status."""
    return run(prog, lambda: _run(arguments, prog))


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help="a model's folder, its config.json, or a name in the cache of Hugging Face, which says all but --drafts, --deterministic and --kv-cache-dtype",
    )
    parser.add_argument(
        "--head-dim", type=int, nargs="+", choices=capabilities.HEAD_DIMS, help="128 if no model is given"
    )
    parser.add_argument(
        "--v-head-dim",
        type=int,
        choices=capabilities.HEAD_DIMS,
        help="of V where it is narrower than K: 128 for MiMo V2, whose --head-dim is 192",
    )
    parser.add_argument("--dtype", nargs="+", choices=capabilities.CUDA_DTYPES, help="bfloat16 if no model is given")
    parser.add_argument("--sinks", action="store_true", help="for models with attention sinks (gpt-oss)")
    parser.add_argument("--logit-cap", action="store_true", help="for models that cap scores (Gemma 2, Grok)")
    parser.add_argument("--drafts", action="store_true", help="for speculative decoding too")
    parser.add_argument("--windows", action="store_true", help="with --drafts: for models with sliding windows too")
    parser.add_argument(
        "--deterministic", action="store_true", help="for servers with --enable-deterministic-inference"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=["auto", *capabilities.FP8, "int4", "int2"],
        default=["auto"],
        help="of the server's --kv-cache-dtype, or int4 and int2 of SGLANG_PAT_KV",
    )
    parser.add_argument(
        "--arch", type=architecture, help="compute capability such as 8.0 or 9.0; default: this machine's GPU"
    )
    return parser


def asked(arguments: list[str] | None, prog: str) -> list[cuda.Variant]:
    """The modules that a command line asks for."""
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    if options.model is not None:
        shape = ("head_dim", "v_head_dim", "sinks", "logit_cap", "windows")
        if given := [name for name in shape if getattr(options, name)]:
            parser.error(f"--{given[0].replace('_', '-')} follows from the model: leave it out, or --model")
    elif options.windows and not options.drafts:
        parser.error("--windows is for drafts: give --drafts too, or leave it out")
    try:
        _complete(options)
    except model_config.ModelError as error:
        parser.error(f"--model: {error}")
    if options.arch is None and not torch.cuda.is_available():
        parser.error("there is no GPU here to compile for: name its compute capability with --arch")
    arch = options.arch or cuda.arch_of(torch.device("cuda"))
    try:
        return variants_of(options, arch)
    except ValueError as error:
        parser.error(str(error))


def _run(arguments: list[str] | None, prog: str) -> None:
    found = asked(arguments, prog)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        jit.check_cache()
        jit.load("packing")
        cuda.build(found)
    except jit.BuildError as error:
        sys.exit(str(error))
