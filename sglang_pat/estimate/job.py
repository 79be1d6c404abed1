"""The prefix tree of an offline job (`sglang-pat batch`), before it runs."""

from __future__ import annotations

from sglang_pat.estimate.costs import gpu_with, layers_of, pack_config
from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model
from sglang_pat.estimate.prompts import Prompt
from sglang_pat.packing import FORMATS, PackConfig

AT_A_TIME = 256
"""Requests of a job that are shown together."""


def job(prompts: list[Prompt], model: Model, gpu_name: str) -> tuple[PackConfig, int, list[list[int]]]:
    """A job's tree, as batches for the planner.

    Args:
        prompts: All of the job's.
        model: What serves them; of several kinds of layers, the most frequent one is used.
        gpu_name: One of GPUS.

    Returns:
        How it is packed; the number of layers; and the places in `prompts` in the order of the tree, AT_A_TIME at a time.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model; or agents' sessions are no job.
    """
    if any(prompt.session is not None for prompt in prompts):
        raise EstimateError("turns of agents' sessions follow one another: they are no job")
    kv = FORMATS["bfloat16"]
    gpu, layers = gpu_with(gpu_name, kv), layers_of(model, kv)
    spec = max(layers, key=layers.__getitem__)
    order = sorted(range(len(prompts)), key=lambda place: (prompts[place].block, prompts[place].blocks))
    places = [order[start : start + AT_A_TIME] for start in range(0, len(order), AT_A_TIME)]
    return pack_config(spec, gpu), layers[spec], places
