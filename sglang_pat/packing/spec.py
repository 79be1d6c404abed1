"""What a layer's attention computes. Support checks, prices, kernels and their tests are derived from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sglang_pat.packing.cost import CostModel, Count

MAX_WINDOW = 1 << 30
"""More tokens than any context has."""

Window = Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW)]


LOW_BIT_PAGE = 64
"""Tokens of a page (csrc/cpu/low_bit.h, `kPageTokens`)."""


class KVFormat(msgspec.Struct, frozen=True):
    """How K and V are stored.

    Attributes:
        name: Torch's name of the dtype, which stands for a plain format; others have names of ours.
        bits: Bits of an element.
        layout: Where elements and scales are. `plain`: each slot has K and V of a token; with 8 bits there is one scale for all of K and one for all of
            V. `pages`: full pages of LOW_BIT_PAGE tokens have a scale and a zero, of 16 bits each, for every channel of K and for every token of V; the
            tokens behind them have the model's dtype.
    """

    name: str
    bits: Count
    layout: Literal["plain", "pages"] = "plain"

    @property
    def grain(self) -> int:
        """Tokens that are stored together: on a GPU plans do not cut them."""
        return LOW_BIT_PAGE if self.layout == "pages" else 1

    def bytes_with_scales(self, head_dim: int, v_head_dim: int) -> float:
        """Bytes of an element, with its share of what the layout stores beside it."""
        parameters = 32 * (head_dim / LOW_BIT_PAGE + 1) if self.layout == "pages" else 0  # bits of a token
        return (self.bits + parameters / (head_dim + v_head_dim)) / 8


FORMATS = {
    form.name: form
    for form in (
        KVFormat("float32", 32),
        KVFormat("float16", 16),
        KVFormat("bfloat16", 16),
        KVFormat("float8_e4m3fn", 8),
        KVFormat("float8_e5m2", 8),
        KVFormat("int4", 4, "pages"),
        KVFormat("int2", 2, "pages"),
    )
}
"""Formats that at least one executor reads; `capabilities.refusal` says which."""


class AttentionSpec(msgspec.Struct, frozen=True):
    """A layer's attention. Layers with equal specs share a plan (backend/groups.py).

    Attributes:
        heads, kv_heads: Query and KV heads on this rank.
        head_dim, v_head_dim: Dimensions of Q and K, and of V.
        kv: How K and V are stored.
        window: How many tokens a query sees, its own included; 0 for all.
        sinks: Whether each head has an attention sink: a logit without a value (gpt-oss).
        query_tokens: Tokens of a request that attend in one step: 1 in a decode step, the draft's tokens in a verify step. They are planned
            as one query that has the heads of all of them.
        capped: Whether scores are capped (`logit_cap`: Gemma 2, Grok).
        latent: Whether V is the first `v_head_dim` columns of K and not stored a second time: MLA, whose Q has taken in what makes K of a latent, and
            whose output is turned into V's afterwards.
    """

    heads: Count
    kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    kv: KVFormat
    window: Window = 0
    sinks: bool = False
    query_tokens: Count = 1
    capped: bool = False
    latent: bool = False

    @property
    def query_heads(self) -> int:
        """Heads of a query: the query heads of all of its tokens."""
        return self.heads * self.query_tokens

    @property
    def planned_window(self) -> int:
        """How many tokens the tokens of a query see together; 0 for all."""
        return self.window + self.query_tokens - 1 if self.window else 0

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} and {self.v_head_dim}"
        seen = f", a window of {self.window}" if self.window else ""
        drafts = f", drafts of {self.query_tokens}" if self.query_tokens > 1 else ""
        features = f"{', sinks' if self.sinks else ''}{', capped scores' if self.capped else ''}"
        form = f"{self.kv.name}{' latents' if self.latent else ''}"
        return f"{self.heads}/{self.kv_heads} heads of {dims}, {form}{seen}{features}{drafts}"

    def cost(self, head_splits: int = 1) -> CostModel:
        """The cost model of a layer; `head_splits` as in `CostModel`."""
        kv_bytes = self.kv.bytes_with_scales(self.head_dim, self.v_head_dim)
        return CostModel(
            self.query_heads, self.kv_heads, self.head_dim, self.v_head_dim, kv_bytes, head_splits=head_splits,
            latent=self.latent,
        )  # fmt: skip
