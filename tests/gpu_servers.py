"""Servers that tests start on a GPU: their flags, their environment, and where their caches have KV."""

from sglang_pat.demo.server import Server

COMMON = ["--dtype", "float16", "--mem-fraction-static", "0.15", "--max-running-requests", "64"]
WITHOUT_PREFILL_GRAPHS = [*COMMON, "--disable-prefill-cuda-graph"]
POOL = "--max-total-tokens"
CHECKED = {"SGLANG_PAT_VERIFY": "1"}


def cached(server: Server, prompts: list[str]) -> dict[str, int]:
    """Where what the server has of these prompts comes from: tokens by tier."""
    body = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    details = [answer["meta_info"].get("cached_tokens_details") or {} for answer in server.post("/generate", body)]
    return {tier: sum(one.get(tier) or 0 for one in details) for tier in ("device", "host", "storage")}
