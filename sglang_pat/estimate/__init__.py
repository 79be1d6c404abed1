"""`sglang-pat estimate`: what packing would bring a workload, from its prompts and a model's config.json.

`prompts.py` reads the requests and builds their prefix tree, `models.py` reads the model, `costs.py` says what a decode step takes with
and without packing, `table.py` prints it, and `job.py` has the tree of a job for `sglang-pat explain`.
"""

from sglang_pat.estimate.costs import GPUS
from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.job import job
from sglang_pat.estimate.models import Model, read_model
from sglang_pat.estimate.prompts import Prompt, batch_of, load, read
from sglang_pat.estimate.table import KV_CACHES, estimate
