"""A job's prefix tree, before the job runs."""

from __future__ import annotations

from sglang_pat.estimate.costs import GPUS, layers_on, pack_config
from sglang_pat.estimate.models import Model
from sglang_pat.estimate.prompts import Prompt, batch_of
from sglang_pat.packing import FORMATS, Batch, PackConfig

AT_A_TIME = 256
"""Requests of a job that are shown together."""


def computed_before(prompts: list[Prompt]) -> int:
    """Tokens of all prompts that an unlimited cache would have had."""
    nodes: dict[tuple[int, int, int], int] = {}  # by the node above, and a block below it
    found = 0
    for prompt in prompts:
        node = -1
        for key in prompt.blocks:
            known = len(nodes)
            node = nodes.setdefault((node, prompt.block, key), known)
            found += prompt.block if node < known else 0
    return found


def job(prompts: list[Prompt], model: Model, gpu_name: str) -> tuple[PackConfig, int, list[tuple[list[int], Batch]]]:
    """What the planner sees of a job's tree.

    Args:
        prompts: All of the job's.
        model: What serves them; of several kinds of layers, the most frequent one is used.
        gpu_name: One of GPUS.

    Returns:
        How it is packed; the number of layers; and in the order of the tree, AT_A_TIME requests each, their places in `prompts` and a
        batch of them.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    layers = layers_on(gpu_name, model, FORMATS["bfloat16"])
    spec = max(layers, key=layers.__getitem__)
    order = sorted(range(len(prompts)), key=lambda place: (prompts[place].block, prompts[place].blocks))
    places = [order[start : start + AT_A_TIME] for start in range(0, len(order), AT_A_TIME)]
    return (
        pack_config(spec, GPUS[gpu_name]),
        layers[spec],
        [(some, batch_of([prompts[i] for i in some])) for some in places],
    )
