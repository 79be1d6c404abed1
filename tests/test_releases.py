"""What is done about other releases of SGLang than the tests run with, and about what they lack."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_pat import compat, plugin
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.start import support
from sglang_pat.compat.releases import RUN
from sglang_pat.radix_bridge import hooks

HEADROOM = "get_req_to_token_extra_context_len"


def arguments(**given: Any) -> SimpleNamespace:
    backends = dict.fromkeys(["prefill_attention_backend", "decode_attention_backend", "speculative_algorithm"])
    chosen = {
        "attention_backend": "pat",
        "device": "cpu",
        "model_path": "instance://",
        "speculative_num_draft_tokens": 6,
    }
    return SimpleNamespace(**(backends | chosen | given))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[HookRegistry]:
    """SGLang's registry, in which nothing is hooked."""
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    with suppress(ImportError):
        from sglang.srt.arg_groups import resolution_hooks

        monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    return HookRegistry


def test_an_installed_sglang_is_kept() -> None:
    """pip leaves alone what satisfies the requirement, and takes the newest where there is none."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (sglang,) = [found for found in map(Requirement, project["dependencies"]) if found.name == "sglang"]
    for release in (*RUN, "0.5.24rc1", "0.5.99", "0.6.0", "1.0", "12.3"):
        assert sglang.specifier.contains(release, prereleases=True), release
    assert not sglang.specifier.contains("0.5.16") and not sglang.extras


def test_releases_are_named_oldest_first() -> None:
    assert list(RUN) == sorted(RUN, key=lambda release: [int(part) for part in release.split(".")])
    assert compat.release() in RUN


@pytest.mark.parametrize("fails", ["raise RuntimeError", "import nothing_of_this_name", "1 / 0"])
def test_a_module_that_cannot_be_imported_lacks_its_targets(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pat_broken.py").write_text(fails)
    monkeypatch.syspath_prepend(tmp_path)
    assert compat.registry.problem("pat_broken:Class.method") == "this SGLang has no pat_broken.Class.method"


@pytest.mark.parametrize("drafts", [None, "NGRAM"])
def test_without_the_hook_that_widens_rows_drafts_are_refused_before_anything_starts(
    drafts: str | None, registry: type[HookRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[Any] = []
    given = arguments(speculative_algorithm=drafts)
    for sentence in (
        f"{HEADROOM} is not hooked: leave it out",
        f"this SGLang has no sglang.srt.mem_cache.allocation_sizing.{HEADROOM}",
    ):
        if drafts is None:
            plugin.adjust_for_model(resolved.append, given)
        else:
            with pytest.raises(UnsupportedError) as refusal:
                plugin.adjust_for_model(resolved.append, given)
            text = str(refusal.value)
            assert sentence in text and "--speculative-algorithm" in text and "\n" not in text
        monkeypatch.delattr(allocation_sizing, HEADROOM, raising=False)
    assert len(resolved) == (2 if drafts is None else 0)
    registry._patched.add(compat.pool.ROW_HEADROOM)
    with pytest.raises(UnsupportedError, match="this SGLang has no") if drafts else nullcontext():
        plugin.adjust_for_model(resolved.append, given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_hooks_that_size_its_pool_kv_of_few_bits_is_refused(
    device: str, registry: type[HookRegistry]
) -> None:
    compat.arguments.around_model_adjustments(plugin.adjust_for_model)
    needed = [compat.pool.CELL_SIZE, compat.pool.POOL_SIZES]
    if device != "cpu":
        needed += [compat.pool.POOL, *registry._hooks]
    for target in needed:
        with pytest.raises(UnsupportedError, match=r"for SGLANG_PAT_KV, as .* is not hooked"):
            support.check_guards(arguments(device=device), {"SGLANG_PAT_KV": "int4"})
        registry._patched.add(target)
    support.check_guards(arguments(device=device), {"SGLANG_PAT_KV": "int4"})


@pytest.mark.parametrize("room", [13, 14])
def test_rows_without_room_for_drafts_are_refused(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made them so: what is written behind one belongs to another request."""
    monkeypatch.setattr(compat.pool, "row_headroom", lambda: 14)
    runner = SimpleNamespace(
        req_to_token_pool=ReqToTokenPool(2, 64 + room, "cpu", False), model_config=SimpleNamespace(context_len=64),
        server_args=arguments(speculative_algorithm="NGRAM"),
    )  # fmt: skip
    if room == 14:
        support.check_rows(runner)
    else:
        with pytest.raises(UnsupportedError, match="have 13 tokens beyond the context where drafts need 14"):
            support.check_rows(runner)
    runner.server_args.speculative_algorithm = None
    support.check_rows(runner)


def test_servers_with_other_backends_are_as_if_nothing_was_installed() -> None:
    """In processes without arguments of their own too, and where a release keeps them elsewhere."""
    step: list[Any] = []
    for given in (arguments(attention_backend="triton", speculative_algorithm="NGRAM"), object()):
        for hook in (plugin.adjust_for_model, plugin.allow_branches):
            hook(step.append, given)
        assert step == [given, given] and plugin.widened(4, given) == 4
        step.clear()


@pytest.mark.parametrize("cpu", [True, False])
def test_every_hook_is_listed_where_hooks_are_looked_for(
    cpu: bool, registry: type[HookRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Follower:
        observer = SimpleNamespace(give_up=lambda why: None)

    monkeypatch.setenv("SGLANG_PAT_KV", "int4")
    monkeypatch.setattr(plugin.platform, "is_chosen", lambda: cpu)
    monkeypatch.setattr(registry, "apply_hooks", lambda: None)
    for name, value in {"_hooked": False, "_followers": [], "_unpacked_because": "", "_siblings": None}.items():
        monkeypatch.setattr(hooks, name, value)
    plugin.register()
    hooks.install(Follower(), graphs=True, defer=True)
    targets = {*registry._hooks}
    with suppress(ImportError):
        from sglang.srt.arg_groups import resolution_hooks

        targets |= {*resolution_hooks._HOOKS}
    listed = set(re.findall(r"`([\w.]+)`", hooks.__doc__ or ""))
    assert len(targets) > 20
    assert [target for target in targets if target.rpartition(":")[2].removeprefix(".") not in listed] == []


def test_the_step_that_adjusts_arguments_to_the_model_is_hooked(registry: type[HookRegistry]) -> None:
    """Whatever a release calls it."""
    assert compat.arguments.adjustments_problem() != ""
    compat.arguments.around_model_adjustments(plugin.adjust_for_model)
    assert all(map(compat.registry.exists, registry._hooks))
    registry._patched.update(registry._hooks)
    assert compat.arguments.adjustments_problem() == ""
