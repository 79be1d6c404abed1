"""What the process that others are forked from imports (forked.py)."""

from __future__ import annotations

import gc
import sys
import types
from unittest import mock

import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401
import triton.language as tl
from sglang.srt.plugins import hook_registry
from triton.runtime import interpreter

_NAMES: dict[int, list[tuple[types.ModuleType, str]]] = {}
"""Who has a name for a function, by its id."""
_MODULES = {id(module): module for module in sys.modules.values()}  # kept, so that no other one gets its id
for _module in list(sys.modules.values()):
    if isinstance(_module, types.ModuleType):
        for _name, _value in vars(_module).items():
            if callable(_value):
                _NAMES.setdefault(id(_value), []).append((_module, _name))

_search = hook_registry._propagate_patch


def _propagate(original: object, wrapped: object, source_module: object) -> int:
    """SGLang looks through all names of all modules for each function that is hooked, for 70 ms each time and 3 s in a server with PAT. What was
    imported before the fork is looked up; it looks through the rest."""
    found = [(module, name) for module, name in _NAMES.get(id(original), []) if vars(module).get(name) is original]
    for module, name in found:
        setattr(module, name, wrapped)
    _NAMES[id(wrapped)] = _NAMES.get(id(original), [])
    rest = {name: module for name, module in list(sys.modules.items()) if id(module) not in _MODULES}
    with mock.patch.object(hook_registry, "sys", types.SimpleNamespace(modules=rest)):
        return len(found) + _search(original, wrapped, source_module)


hook_registry._propagate_patch = _propagate

_patch_lang = interpreter._patch_lang
_patched: set[frozenset[int]] = set()


def _patch_once(function: types.FunctionType) -> interpreter._LangPatchScope:
    """Triton's interpreter patches its language, for 7 ms on a CPU, in each launch of a kernel and each function that this calls, and puts it back. Here
    nothing else needs it."""
    langs = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if langs not in _patched:
        _patch_lang(function)
        _patched.add(langs)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once

# Collections in servers need not look at what no server will ever free.
gc.collect()
gc.freeze()
