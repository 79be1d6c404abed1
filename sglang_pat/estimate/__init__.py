"""`sglang-pat estimate`: what packing would bring a workload, from its prompts and a model's config.json.

`prompts.py` reads the requests and builds their prefix tree, `models.py` reads the model, `costs.py` says what a decode step takes with
and without packing, and `table.py` prints it.
"""

from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import read_model
from sglang_pat.estimate.prompts import read
from sglang_pat.estimate.table import KV_CACHES, estimate

__all__ = ["KV_CACHES", "EstimateError", "estimate", "read", "read_model"]
