"""SGLang's HookRegistry: how functions of SGLang are hooked, and whether they are.

The registry applies the hooks of a target once. So targets are written with a colon behind the module here (`pkgutil.resolve_name` takes both forms):
what another plugin hooks, by the name with dots, at whatever time, has an entry of its own, and both hooks are called.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


def hook(target: str, function: Callable[..., Any], around: bool = False) -> None:
    """Have SGLang call `function` where it calls `target`, once its registry applies what is registered.

    Args:
        target: `module:Class.method`, or `module:.function`.
        function: `function(result, …)`, called afterwards; with `around`, `function(original, …)`, called instead.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType.AROUND if around else HookType.AFTER)


def apply() -> None:
    """Apply what was registered after SGLang's plugins were loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def exists(target: str) -> bool:
    """Whether this SGLang has the target."""
    owner, _, name = target.rpartition(".")
    try:
        inspect.getattr_static(pkgutil.resolve_name(owner), name)
    except Exception:  # a module may fail in any way when it is imported
        return False
    return True


def problem(target: str) -> str:
    """Why a target was not hooked; empty if it was. SGLang logs what it cannot hook, and goes on. Whoever replaces a target later removes the hook: what
    guards memory looks at what was made too (`support.check_rows`, `support.check_low_bit`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    shown = target.replace(":.", ".").replace(":", ".")
    if not exists(target):
        return f"this SGLang has no {shown}"
    return "" if target in HookRegistry._patched else f"{shown} is not hooked"
