"""`sglang-pat estimate`: what packing would bring a workload, from its prompts and a model's config.json.

`prompts.py` reads the requests and builds their prefix tree, `models.py` reads the model, `costs.py` says what a decode step takes with
and without packing, and gives the tree of a job to `sglang-pat explain`, and `table.py` prints what it says.
"""

from sglang_pat.estimate.costs import GPUS, job
from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model, read_model
from sglang_pat.estimate.prompts import Prompt, batch_of, load
from sglang_pat.estimate.table import KV_CACHES, estimate
