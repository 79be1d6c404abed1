"""Compiles ahead of time what a server needs on a GPU: `python -m sglang_pat.build --head-dim 128 --dtype bfloat16`.

Run it with the GPU and the kind of CPU of the servers. It fills the folder TVM_FFI_CACHE_DIR, else ~/.cache/tvm-ffi. Servers of other users load what root
made there, or the user that they name in SGLANG_PAT_CACHE_OWNER, if nobody else can write it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from sglang_pat import jit
from sglang_pat.cli.parser import Parser, run
from sglang_pat.kernels import capabilities, cuda, resources
from sglang_pat.packing import FORMATS, AttentionSpec

PROG = "python -m sglang_pat.build"

DRAFT_HEADS = (1, 8, 32)
"""Query heads of a KV head, of drafts of two tokens with different modules (`capabilities.tiles_for_drafts` and `has_tails`)."""

LEAST_CAPABILITY = 8
"""Of the GPUs that there are kernels for (docs/support.md)."""


def architecture(text: str) -> str:
    """A compute capability as `cuda.arch_of` names it.

    Raises:
        argparse.ArgumentTypeError: It is none that there are kernels for.
    """
    found = re.fullmatch(r"([0-9]{1,2})\.([0-9])a?", text)
    if found is None or int(found[1]) < LEAST_CAPABILITY:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability of {LEAST_CAPABILITY}.0 or more")
    return cuda.arch_name(int(found[1]), int(found[2]))


def variants_of(options: argparse.Namespace, arch: str) -> list[cuda.Variant]:
    """The modules of servers with these options.

    Raises:
        ValueError: There are no kernels for one of them.
    """
    found: dict[cuda.Variant, None] = {}
    for name, kv, dim in itertools.product(options.dtype, options.kv_cache_dtype, options.head_dim):
        form = FORMATS[name if kv == "auto" else capabilities.FP8.get(kv, kv)]
        spec = AttentionSpec(1, 1, dim, options.v_head_dim or dim, form, sinks=options.sinks, capped=options.logit_cap)
        # With as many query heads of a KV head as a group of warps has rows, work items may have tails.
        specs = [spec, msgspec.structs.replace(spec, heads=capabilities.GROUP_ROWS)]
        if options.drafts:
            windows = (0, 1) if options.windows else (0,)
            specs += [
                msgspec.structs.replace(spec, heads=heads, window=window, query_tokens=2)
                for window in windows
                for heads in DRAFT_HEADS
            ]
        for one in specs:
            # Extends of KV in few bits run over a workspace (backend/low_bit_prefill.py), those of drafts are the first spec's.
            extends = one is spec and not form.is_low_bit
            found.update(dict.fromkeys(cuda.variants(one, arch, dtype=getattr(torch, name), extends=extends)))
    return list(found)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run(PROG, lambda: _run(arguments))


def _run(arguments: list[str] | None) -> None:
    parser = Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=capabilities.HEAD_DIMS, default=[128])
    parser.add_argument(
        "--v-head-dim",
        type=int,
        choices=capabilities.HEAD_DIMS,
        help="of V where it is narrower than K: 128 for MiMo V2, whose --head-dim is 192",
    )
    parser.add_argument("--dtype", nargs="+", choices=capabilities.CUDA_DTYPES, default=["bfloat16"])
    parser.add_argument("--sinks", action="store_true", help="for models with attention sinks (gpt-oss)")
    parser.add_argument("--logit-cap", action="store_true", help="for models that cap scores (Gemma 2, Grok)")
    parser.add_argument("--drafts", action="store_true", help="for speculative decoding too")
    parser.add_argument("--windows", action="store_true", help="with --drafts: for models with sliding windows too")
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
    parser.add_argument(
        "--report", action="store_true", help="only print registers, spills and shared memory; needs no GPU"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.windows and not options.drafts:
        parser.error("--windows is for drafts: give --drafts too, or leave it out")
    if options.arch is None and not torch.cuda.is_available():
        parser.error("there is no GPU here to compile for: name its compute capability with --arch")
    arch = options.arch or cuda.arch_of(torch.device("cuda"))
    try:
        variants = variants_of(options, arch)
    except ValueError as error:
        parser.error(str(error))
    if not options.report:
        try:
            jit.check_cache()
            jit.load("packing")
            cuda.build(variants)
        except jit.BuildError as error:
            sys.exit(str(error))
        return
    with ThreadPoolExecutor() as pool:
        try:
            for variant, found in zip(variants, pool.map(resources.measure, variants), strict=True):
                print(
                    f"{variant.name}: {found.registers} registers, {found.spill_bytes} bytes of spills, "
                    f"{found.shared_bytes} bytes of shared memory"
                )
        except jit.BuildError as error:
            sys.exit(str(error))
