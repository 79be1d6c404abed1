"""What packing did, counted since the server started."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from sglang_pat.packing import Plan


class Counters(msgspec.Struct):
    """Counts of one scheduler process.

    Attributes:
        steps: Decode steps.
        plans: Plans made; the other steps reused one.
        fallbacks: Steps that ran one query per work item because planning failed.
        requests: Requests decoded.
        work_items: Work items run by all steps.
        query_sizes: How many of them had 1, 2, 3 ... queries.
        kv_tokens: KV tokens that the steps read, per layer.
        kv_tokens_unpacked: What one query per work item would have read.
    """

    steps: int = 0
    plans: int = 0
    fallbacks: int = 0
    requests: int = 0
    work_items: int = 0
    query_sizes: Counter[int] = msgspec.field(default_factory=Counter)
    kv_tokens: int = 0
    kv_tokens_unpacked: int = 0

    def add_run(self, plan: Plan, seq_lens: list[int], steps: int) -> None:
        """Count `steps` steps run with `plan`, made when the requests had `seq_lens` tokens.

        Every step each request, and with it every open work item, has one token more.
        """
        grown = steps * (steps - 1) // 2
        self.steps += steps
        self.work_items += steps * len(plan.items)
        for item in plan.items:
            self.query_sizes[len(item.queries)] += steps
        self.kv_tokens += steps * plan.kv_tokens + grown * plan.open_items
        self.kv_tokens_unpacked += steps * sum(seq_lens) + grown * len(seq_lens)

    def report(self, layer_token_bytes: int) -> dict[str, Any]:
        """For `/get_server_info`: the counts, and bytes where one KV token takes `layer_token_bytes`."""
        return {
            **msgspec.structs.asdict(self),
            "query_sizes": {str(size): count for size, count in sorted(self.query_sizes.items())},
            "kv_bytes": self.kv_tokens * layer_token_bytes,
            "kv_bytes_unpacked": self.kv_tokens_unpacked * layer_token_bytes,
        }
