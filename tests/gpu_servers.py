"""Servers that tests start on a GPU: their flags, their environment, and where their caches have KV."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sglang_pat.demo.server import Server

COMMON = ["--dtype", "float16", "--mem-fraction-static", "0.15", "--max-running-requests", "64"]
WITHOUT_PREFILL_GRAPHS = [*COMMON, "--disable-prefill-cuda-graph"]
POOL = "--max-total-tokens"
CHECKED = {"SGLANG_PAT_VERIFY": "1"}


@contextmanager
def serving(
    model: Path, cases: Mapping[str, tuple[str, Sequence[str], dict[str, str]]], flags: Sequence[str], folder: Path
) -> Iterator[dict[str, Server]]:
    """Servers that have started, by case.

    Args:
        model: Which they serve.
        cases: Backend, flags and environment of each.
        flags: Of all.
        folder: For their logs.
    """
    with ExitStack() as stack:
        servers = {
            case: stack.enter_context(Server(model, backend, folder / f"{case}.log", [*flags, *more], environment, on_cpu=False))
            for case, (backend, more, environment) in cases.items()
        }  # fmt: skip
        for server in servers.values():
            server.wait()
        yield servers


def cached(server: Server, prompts: list[str]) -> dict[str, int]:
    """Where what the server has of these prompts comes from: tokens by tier."""
    body = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    details = [answer["meta_info"].get("cached_tokens_details") or {} for answer in server.post("/generate", body)]
    return {tier: sum(one.get(tier) or 0 for one in details) for tier in ("device", "host", "storage")}
