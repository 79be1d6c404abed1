"""Counters of what packing did since the server started."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_pat.packing.native import Totals


class Counters(Totals):
    """Counters of one scheduler process: those of `Totals`, and these.

    Attributes:
        plans: Plans made; the other steps reused one.
        plans_ahead: How many of them were ready before their step.
        fallbacks: Steps that ran one query per work item because planning failed.
        too_large: Steps that packed less, because their plan did not fit its memory.
        planning_us: Microseconds that the scheduler process spent on plans.
    """

    plans: int = 0
    plans_ahead: int = 0
    fallbacks: int = 0
    too_large: int = 0
    planning_us: int = 0

    def report(self, layer_token_bytes: int) -> dict[str, Any]:
        """For `/server_info`: the counters, and bytes of KV, of which one token takes `layer_token_bytes`."""
        counts = msgspec.structs.asdict(self)
        del counts["kv_by_queries"]
        return {
            **counts,
            "query_sizes": {str(size): count for size, count in sorted(self.query_sizes.items())},
            "kv_bytes_by_queries": {
                str(size): tokens * layer_token_bytes for size, tokens in sorted(self.kv_by_queries.items())
            },
            "kv_bytes": self.kv_tokens * layer_token_bytes,
            "kv_bytes_unpacked": self.kv_tokens_unpacked * layer_token_bytes,
        }
