"""The error of `sglang-pat estimate`."""


class EstimateError(Exception):
    """The file, the model or the GPU cannot be estimated; the message says why."""
