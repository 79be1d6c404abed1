"""Settings: the `SGLANG_PAT_*` environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from sglang_pat.jit import SANITIZE, BuildError, uid_of
from sglang_pat.packing.prices import Policy
from sglang_pat.platform import AWAKE
from sglang_pat.text import is_showable

KEY = "SGLANG_PAT_API_KEY"
"""The environment variable with the key of the servers that the tools ask."""

_OF_A_SERVICE = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""Kubernetes sets variables that start with `SGLANG_PAT_` and end like this, in every pod of a namespace with a Service named `sglang-pat` or
`sglang-pat-...` (kubernetes.io, "Accessing the Service", environment variables)."""


KV = Literal["", "int4", "int2"]
"""Formats of less than 8 bits (`packing.FORMATS`)."""


class ConfigError(ValueError):
    """A `SGLANG_PAT_*` variable is unknown, or has an invalid value."""


class PatConfig(msgspec.Struct, frozen=True):
    """Settings; the defaults are right for serving.

    Attributes:
        policy: `SGLANG_PAT_POLICY`: how queries are packed. `optimal` has the lowest cost by the model of bytes and time (on a GPU it packs
            no MLA model with too many heads, and the log says so), `pat` is the paper's heuristic, `naive` packs every node of the tree, and `query` gives every
            request its own work items (to see what packing brings).
        reuse: `SGLANG_PAT_REUSE`: 1 keeps a plan until the batch or one of its paths changes; 0 plans every step.
        ahead: `SGLANG_PAT_AHEAD`: 1 plans the next batch on another thread while a step runs; 0 plans it when its step begins.
        defer: `SGLANG_PAT_DEFER`: 1 lets a request wait if another one is computing 128 or more of its tokens; 0 lets both
            compute them.
        kv: `SGLANG_PAT_KV`: `int4` or `int2` stores full pages of 64 tokens in so many bits per element of K and V; if empty,
            `--kv-cache-dtype` decides. 2 bits lose accuracy.
        int4_layers: `SGLANG_PAT_INT4_LAYERS`: layers that keep 4 bits beside `SGLANG_PAT_KV=int2`, such as `15,17,20`: numbers from 0 on, with
            commas. `benchmarks/low_bit_perplexity.py --find-layers` finds those that need them most.
        verify: `SGLANG_PAT_VERIFY`: 1 checks before each step that the queries of every work item have the same KV slots, and
            that each query reads exactly what it sees; if not, the step runs one query per work item. Slow; for tests.
        tiles: `SGLANG_PAT_TILES`: a file that `python -m sglang_pat.tune` wrote for this GPU, to use instead of the built-in
            table; none if empty.
        trace: `SGLANG_PAT_TRACE`: a file to record events and plans in, for `sglang-pat replay`; none if empty. Recording ends, with a
            warning, if somebody removes, empties or shortens it.
        trace_mb: `SGLANG_PAT_TRACE_MB`: recording stops when the file has this many megabytes.
        cache_owner: `SGLANG_PAT_CACHE_OWNER`: a user, by name or number, whose compiled modules are loaded too, besides root's and the server's
            own user's. That user can run any code as the server.
    """

    policy: Policy = "optimal"
    reuse: bool = True
    ahead: bool = True
    defer: bool = True
    kv: KV = ""
    int4_layers: tuple[int, ...] = ()
    verify: bool = False
    tiles: str = ""
    trace: str = ""
    trace_mb: int = 256
    cache_owner: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> PatConfig:
        """Read the variables.

        Raises:
            ConfigError: A variable is unknown or has an invalid value; the message names it and the valid values.
        """
        prefix = "SGLANG_PAT_"
        values: dict[str, Any] = {}
        for variable, value in environment.items():
            if not variable.startswith(prefix) or variable in (AWAKE, KEY, SANITIZE):
                continue
            name = variable.removeprefix(prefix)
            if _OF_A_SERVICE.fullmatch(name):
                continue
            if not variable.isprintable():
                raise ConfigError(f"{variable!a} is not a setting of sglang-pat: unset it")
            field = name.lower()
            # Others read SGLANG_PAT_KV too, by this name.
            if name != name.upper() or field not in cls.__struct_fields__:
                known = ", ".join(prefix + known.upper() for known in cls.__struct_fields__)
                raise ConfigError(f"{variable} is not a setting of sglang-pat: unset it, or use one of {known}")
            values[field] = _parse(variable, value, field)
        if values.get("int4_layers") and values.get("kv") != "int2":
            raise ConfigError(f"{prefix}INT4_LAYERS names layers beside {prefix}KV=int2: set that, or unset it")
        return cls(**values)


def _parse(variable: str, value: str, field: str) -> Any:
    if field in ("tiles", "trace"):
        if not is_showable(value):
            raise ConfigError(f"{variable}={value!a} has characters that cannot be shown: name another file")
        return value
    if field == "trace_mb":
        if re.fullmatch("[0-9]{1,9}", value) is None or int(value) == 0:
            raise ConfigError(f"{variable}={value!r} must be a number of megabytes, from 1 to 999,999,999")
        return int(value)
    if field == "int4_layers":
        # No model has a thousand layers.
        if re.fullmatch("([0-9]{1,3}(,[0-9]{1,3})*)?", value) is None:
            raise ConfigError(f"{variable}={value!r} must be numbers of layers with commas, such as 15,17,20")
        return tuple(sorted({int(number) for number in value.split(",")})) if value else ()
    if field == "cache_owner":
        try:
            return value and str(uid_of(value))
        except BuildError as error:
            raise ConfigError(str(error)) from None
    switch = {"0": False, "1": True}
    names = {"policy": get_args(Policy), "kv": get_args(KV)}.get(field)
    allowed = {name: name for name in names} if names else switch
    if value not in allowed:
        raise ConfigError(f"{variable}={value!r} must be one of {', '.join(filter(None, allowed))}")
    return allowed[value]
