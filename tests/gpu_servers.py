"""Flags and environment of the servers that tests start on a GPU."""

COMMON = ["--dtype", "float16", "--mem-fraction-static", "0.15", "--max-running-requests", "64"]
WITHOUT_PREFILL_GRAPHS = [*COMMON, "--disable-prefill-cuda-graph"]
POOL = "--max-total-tokens"
CHECKED = {"SGLANG_PAT_VERIFY": "1"}
