"""What packing did, counted since the server started."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_pat.packing.native import Totals


class Counters(Totals):
    """Counts of one scheduler process, beside those of the steps.

    Attributes:
        plans: Plans made; the other steps reused one.
        plans_ahead: How many of them were ready before their step.
        fallbacks: Steps that ran one query per work item because planning failed.
        planning_us: Microseconds that the engine's thread spent on getting plans.
    """

    plans: int = 0
    plans_ahead: int = 0
    fallbacks: int = 0
    planning_us: int = 0

    def report(self, layer_token_bytes: int) -> dict[str, Any]:
        """For `/server_info`: the counts, and bytes where one KV token takes `layer_token_bytes`."""
        return {
            **msgspec.structs.asdict(self),
            "query_sizes": {str(size): count for size, count in sorted(self.query_sizes.items())},
            "kv_bytes": self.kv_tokens * layer_token_bytes,
            "kv_bytes_unpacked": self.kv_tokens_unpacked * layer_token_bytes,
        }
