"""Compiles the modules for a GPU ahead of time: `python -m sglang_pat.build --head-dim 128 --dtype bfloat16`."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from sglang_pat import jit
from sglang_pat.kernels import capabilities, cuda, resources
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.parser import Parser


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m sglang_pat.build", description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=capabilities.HEAD_DIMS, default=[128])
    parser.add_argument(
        "--v-head-dim", type=int, help="of V where it is narrower than K: 128 for MiMo V2, whose --head-dim is 192"
    )
    parser.add_argument("--dtype", nargs="+", choices=capabilities.CUDA_DTYPES, default=["bfloat16"])
    parser.add_argument("--sinks", action="store_true", help="for models with attention sinks (gpt-oss)")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=["auto", *capabilities.FP8], default=["auto"])
    parser.add_argument("--arch", help="compute capability such as 8.0 or 9.0a; default: this machine's GPU")
    parser.add_argument(
        "--report", action="store_true", help="only print registers, spills and shared memory; needs no GPU"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.arch is None and not torch.cuda.is_available():
        parser.error("there is no GPU here to compile for: name its compute capability with --arch")
    arch = options.arch or cuda.arch_of(torch.device("cuda"))
    specs = [
        (
            AttentionSpec(
                1, 1, dim, options.v_head_dim or dim, FORMATS[capabilities.FP8.get(kv, dtype)], sinks=options.sinks
            ),
            getattr(torch, dtype),
        )
        for dtype in options.dtype
        for kv in options.kv_cache_dtype
        for dim in options.head_dim
    ]
    try:
        variants = [cuda.Variant.of(spec, arch, dtype=dtype) for spec, dtype in specs]
    except ValueError as error:
        parser.error(str(error))
    if not options.report:
        try:
            jit.load("packing")
            cuda.build(variants)
        except jit.BuildError as error:
            sys.exit(str(error))
        return
    with ThreadPoolExecutor() as pool:
        for variant, found in zip(variants, pool.map(resources.measure, variants), strict=True):
            print(
                f"{variant.name}: {found.registers} registers, {found.spill_bytes} bytes of spills, "
                f"{found.shared_bytes} bytes of shared memory"
            )


if __name__ == "__main__":
    main()
