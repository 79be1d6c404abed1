"""`SRTPlatform` for machines without an accelerator (SGLang: srt/platforms/interface.py)."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_pat import compat
from sglang_pat.backend.start import low_bit, support
from sglang_pat.platform import NAME, announce


class CpuPlatform(SRTPlatform):
    """SGLang's stock memory pools and PyTorch operators, on the CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if compat.arguments.chooses_pat(server_args):
            support.check_arguments(server_args)
        # SGLang would process images with CUDA.
        server_args.disable_fast_image_processor = True
        if low_bit.chosen(server_args) is not None:
            low_bit.choose_defaults(server_args)
        compat.arguments.choose_grammar_backend(server_args)
        compat.arguments.back_up_in_plain_memory(server_args)
        compat.arguments.use_one_pool(server_args)
        compat.arguments.disable_graphs(server_args, "prefill", "decode")

    def init_backend(self) -> None:
        """SGLang calls this once, while it imports what runs models."""
        compat.model.give_latents("pat", "torch_native")

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """0.5.23 asks this; `pat` itself refuses the algorithms that it does not support."""
        return True

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        """`/start_profile` asks this. It is none of torch's activities: SGLang would start a profiler for it and another one for the CPU."""
        return NAME.upper()

    def get_kv_pool_cls(self, kind: str) -> type | None:
        """0.5.23 asks for every kind, even if the model does not need it."""
        return self.get_mha_kv_pool_cls() if kind == "mha" else None

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        form = low_bit.chosen(compat.arguments.of_this_process())
        if form is None:
            return MHATokenToKVPool
        # Imported here, as SGLang's pools are.
        from sglang_pat.backend.kv.pages import pool_class

        return pool_class(form, low_bit.int4_layers())

    def get_mla_kv_pool_cls(self) -> type:
        return compat.pool.latent_pool()

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator


class DormantPlatform(SRTPlatform):
    """SGLang's base platform until the server arguments choose PAT; then `CpuPlatform`."""

    _guessed = False

    def get_device(self, device_id: int = 0) -> str:
        """Without `--device`, SGLang asks for a device before the backend is known."""
        self._guessed = True
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if compat.arguments.chooses_pat(server_args):
            announce()
            self.__class__ = CpuPlatform  # type: ignore[assignment]
            self.apply_server_args_defaults(server_args)
        elif self._guessed:
            raise RuntimeError(
                "No accelerator is available: add --attention-backend pat, or set SGLANG_PLATFORM=pat_cpu to serve with another backend on this CPU."
            )
