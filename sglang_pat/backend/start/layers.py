"""Reads the attention layers of a model: what each computes (`AttentionSpec`), and how many there are of each kind."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from sglang_pat import compat
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.packing.spec import MAX_WINDOW, KVFormat

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

SINKS = ("sinks", "attention_sink_bias")
"""What models call their attention sinks: gpt-oss and Granite, MiMo V2."""


def kv_format(dtype: torch.dtype) -> KVFormat:
    """The format of a KV cache of this dtype. No executor may support it (`capabilities.refusal`)."""
    name = str(dtype).removeprefix("torch.")
    return FORMATS.get(name, KVFormat(name, 8 * dtype.itemsize))


def format_of(runner: ModelRunner) -> KVFormat:
    """The format of a runner's KV cache; some of its layers may have another (`SpecReader`)."""
    form = getattr(runner.token_to_kv_pool, "form", None)  # that of a `LowBitKVPool`
    return form if isinstance(form, KVFormat) else kv_format(runner.kv_cache_dtype)


def window(radius: int | None, context: int) -> int:
    """How many tokens a query sees, its own included; 0 for all.

    Args:
        radius: SGLang's `sliding_window_size`: how far back a query sees; None or -1 for all.
        context: The most tokens that a request may have. A window as long as that counts as none.
    """
    return 0 if radius is None or radius < 0 or radius + 1 >= context else radius + 1


def with_sinks(runner: ModelRunner) -> set[int]:
    """The ids of the layers that have attention sinks, which a module beside them stores; in some models only layers with windows do."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: set[int] = set()
    for module in compat.model.modules(runner):
        if any(isinstance(getattr(module, name, None), torch.nn.Parameter) for name in SINKS):
            found |= {child.layer_id for child in module.children() if isinstance(child, RadixAttention)}
    return found


class SpecReader:
    """Tells the `AttentionSpec` of a layer.

    Attributes:
        form: How K and V are kept, in most layers.
        latent: Whether V is part of K.
        context: As for `window`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        pool = runner.token_to_kv_pool
        self.form = format_of(runner)
        # A pool for windows has slot numbers of its own: there even a window as long as the context counts.
        self.context = MAX_WINDOW if compat.pool.has_window_pool(pool) else runner.model_config.context_len
        self._with_sinks = with_sinks(runner)
        self.latent = compat.pool.latent_dims(pool) is not None
        self._form_of = getattr(pool, "form_of", lambda layer_id: self.form)  # that of a `LowBitKVPool`

    def spec(self, layer: RadixAttention, query_tokens: int = 1) -> AttentionSpec:
        """What this layer's attention computes in steps of so many tokens per query."""
        return AttentionSpec(
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, self._form_of(layer.layer_id),
            window(layer.sliding_window_size, self.context), layer.layer_id in self._with_sinks, query_tokens, compat.model.logit_cap(layer) > 0,
            self.latent,
        )  # fmt: skip


def count(runner: ModelRunner) -> Counter[AttentionSpec]:
    """How many layers of each spec this process decodes, those without a window first. Encoder-only layers do not count."""
    reader = SpecReader(runner)
    found = Counter(map(reader.spec, filter(compat.model.decodes, compat.model.attention_layers(runner))))
    return Counter(dict(sorted(found.items(), key=lambda item: item[0].window)))
