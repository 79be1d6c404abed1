"""`sglang-pat doctor`: what a server would find here, what keeps it from its start, and what to do."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import msgspec

from sglang_pat.cli import parser
from sglang_pat.kernels.capabilities import arch_name
from sglang_pat.text import printable

PATIENCE = 60
"""Seconds that another program may take: importing torch took 30 on two busy cores, and a GPU whose driver hangs takes for ever."""

LONGEST = 200
"""Characters that are shown of what others say."""

ENTRY_POINTS = {"sglang.srt.plugins": "pat", "sglang.srt.platforms": "pat_cpu"}
"""The names in pyproject.toml by which SGLang finds this package."""

ASKED = (
    "TVM_FFI_CACHE_DIR",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "CUDA_VISIBLE_DEVICES",
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
)
"""Variables of others that decide what is found."""

# In a process of its own: a broken torch or driver may end it by a signal, or never answer. What lies in the working directory is not imported.
PROBE = """
import sys; sys.path = [folder for folder in sys.path if folder]
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    there = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if there else []
gpus = [{"name": one.name, "capability": [one.major, one.minor], "bytes": one.total_memory} for one in gpus]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
    "said": " ".join(str(one.message) for one in said if "CUDA" in str(one.message))}))
"""


class Gpu(msgspec.Struct):
    """A GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    bytes: int


class Torch(msgspec.Struct):
    """What torch says of itself."""

    torch: str
    cuda: str | None
    gpus: list[Gpu]
    said: str


class Section(msgspec.Struct):
    """What was found out about one thing.

    Attributes:
        name: What it is about.
        text: What a person reads.
        facts: The same for programs.
        problems: What keeps a server from its start, or makes it another one than was meant.
        more: Further lines of the text.
        warnings: What keeps no server from its start, and is hardly what was meant.
    """

    name: str
    text: str
    facts: dict[str, Any]
    problems: list[str] = []
    more: list[str] = []
    warnings: list[str] = []


class ProbeError(Exception):
    """A program did not say what it was asked; the message says why."""


def sections(model: str | None = None, url: str | None = None, key: str = "") -> list[Section]:
    """All that is found out here."""
    torch = _torch()
    found = torch if isinstance(torch, Torch) else None
    ready = functools.cache(lambda: _ready(found, model))
    checks: dict[str, Callable[[], Section]] = {
        "sglang-pat": _package,
        "SGLang": _sglang,
        "Python": lambda: _python(torch),
        "plugin": lambda: _plugin(found),
        "GPU": lambda: _gpu(found),
        "compilers": lambda: _compilers(found, ready()),
        "kernel cache": lambda: _cache(model, ready()),
        "settings": _settings,
    }
    if model is not None:
        checks["model"] = lambda: _model(model, found)
    if url is not None:
        checks["server"] = lambda: _server(url, key)
    return [_checked(name, check) for name, check in checks.items()]


def _checked(name: str, check: Callable[[], Section]) -> Section:
    """What a check finds; where it fails in a way that nobody foresaw, what it failed with."""
    try:
        return check()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:LONGEST]
        return Section(name, "cannot be told", {}, [f"this was not found out: {why}"])


def doctor(model: str | None, url: str | None, key: str, as_json: bool) -> int:
    """Print what is found; returns 1 if there is a problem, else 0."""
    found = sections(model, url, key)
    problems = [f"{section.name}: {problem}" for section in found for problem in section.problems]
    warnings = [f"{section.name}: {warning}" for section in found for warning in section.warnings]
    if as_json:
        facts = {re.sub(r"\W", "_", section.name.lower()): section.facts for section in found}
        print(parser.as_json({**facts, "problems": problems, "warnings": warnings}))
        return min(1, len(problems))
    for section in found:
        for name, line in zip([section.name, *[""] * len(section.more)], [section.text, *section.more], strict=True):
            print(f"{name:<13} {printable(line)}")
    print()
    for kind, said in (("problem", problems), ("warning", warnings)):
        for line in said:
            print(f"{kind}: {printable(line)}")
    if not problems:
        print("no problem was found" + (", but what is warned of may be one" if warnings else ""))
    return min(1, len(problems))


def _package() -> Section:
    here, found = str(Path(__file__).parents[1]), _version("sglang-pat")
    if found is None:
        problem = "it is not installed, so SGLang does not find it: pip install ."
        return Section(
            "sglang-pat", f"of a folder that is not installed ({here})", {"version": None, "at": here}, [problem]
        )
    return Section("sglang-pat", f"{found} ({here})", {"version": found, "at": here})


def _sglang() -> Section:
    from sglang_pat.compat.releases import RUN, TESTED

    found = _version("sglang")
    if found is None:
        return Section(
            "SGLang", "not installed", {"version": None, "tested": False}, ["it is not installed: pip install sglang"]
        )
    run = RUN.get(found)
    facts: dict[str, Any] = {"version": found, "tested": run is not None}
    if run is not None:
        facts |= {"on_cpu": run.on_cpu, "on_gpu": run.on_gpu}
        more = [
            f"tests on {place}: {ran.replace('`', '')}" for place, ran in (("CPUs", run.on_cpu), ("GPUs", run.on_gpu))
        ]
        return Section("SGLang", f"{found}, tested with sglang-pat", facts, more=more)
    return Section("SGLang", f"{found}, not tested: {' and '.join((TESTED[0], TESTED[-1]))} are", facts)


def _python(torch: Torch | str) -> Section:
    python = platform.python_version()
    facts: dict[str, Any] = {"python": python, "platform": platform.platform()}
    others = {
        name: _version(name)
        for name in ("apache-tvm-ffi", "flashinfer-python", "sglang-kernel", "sgl-kernel", "transformers")
    }
    facts |= others
    shown = ", ".join(f"{name} {found}" for name, found in others.items() if found)
    missing = [] if others["apache-tvm-ffi"] else ["apache-tvm-ffi is not installed: pip install apache-tvm-ffi"]
    if isinstance(torch, str):
        text = f"{python}, torch cannot be used, {shown}"
        return Section("Python", text, {**facts, "torch": None, "cuda": None}, [f"torch {torch}", *missing])
    built = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    facts |= {"torch": torch.torch, "cuda": torch.cuda}
    return Section("Python", f"{python}, torch {torch.torch} ({built}), {shown}", facts, missing)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plugin(torch: Torch | None, environment: Mapping[str, str] = os.environ) -> Section:
    """Whether SGLang finds this package, by what `load_plugins` in its plugins/__init__.py does."""
    problems = []
    for group, name in ENTRY_POINTS.items():
        if not any(entry.name == name for entry in entry_points(group=group)):
            problems.append(f"there is no entry point {name} in {group}: install sglang-pat with pip")
    only = {name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    needed = ["pat", "pat_cpu"] if torch is not None and not torch.gpus else ["pat"]
    if only and (missing := [name for name in needed if name not in only]):
        problems.append(f"SGLANG_PLUGINS leaves out {' and '.join(missing)}: add it, or unset the variable")
    chosen = environment.get("SGLANG_PLATFORM")
    if chosen and chosen != "pat_cpu":
        # Plugins of packages with another platform than the chosen one are not loaded.
        problems.append("SGLANG_PLATFORM leaves it out, as sglang-pat has a platform of its own: unset it")
    others = sorted({entry.name for entry in entry_points(group="sglang.srt.plugins")} - {"pat"})
    text = "not registered with SGLang" if problems else "registered: SGLang knows --attention-backend pat"
    if others:
        text += f"; other plugins: {', '.join(others)}"
    return Section("plugin", text, {"registered": not problems, "others": others}, problems)


def _gpu(torch: Torch | None) -> Section:
    seen = _nvidia_smi()
    if torch is None or not torch.gpus:
        facts: dict[str, Any] = {"gpus": [], "driver": seen[0][1] if seen else None}
        if seen:
            why = f": {torch.said[:LONGEST]}" if torch and torch.said else ""
            return Section("GPU", f"{seen[0][0]}, driver {seen[0][1]}", facts, [f"torch does not see it{why}"])
        warnings = []
        if torch is not None and torch.cuda:
            warnings.append(
                f"no GPU is visible, though torch is built for CUDA {torch.cuda} (a container without --gpus? the driver?): "
                "a server would run on the CPU, slowly"
            )
        return Section("GPU", "none: a server runs on the CPU", facts, warnings=warnings)
    from sglang_pat.packing import devices

    found, texts, problems = [], [], []
    for gpu in torch.gpus:
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        arch = arch_name(*gpu.capability)
        own, any_table = devices.find("", gpu.name), devices.find(arch, gpu.name)
        prices = "none"
        if own is not None:
            prices = "derived" if own.source.startswith("derived") else "measured"
        elif any_table is not None:
            prices = f"as of {any_table.gpu}"
        found.append({"name": gpu.name, "capability": capability, "bytes": gpu.bytes, "prices": prices})
        texts.append(f"{gpu.name} ({capability}, {gpu.bytes / 2**30:.0f} GiB), prices of tiles: {prices}")
        if gpu.capability[0] < 8:
            problems.append(f"{gpu.name} has compute capability {capability}, and 8.0 or more is needed")
    text = "; ".join(f"{texts.count(one)} x {one}" if texts.count(one) > 1 else one for one in dict.fromkeys(texts))
    driver = seen[0][1] if seen else None
    return Section(
        "GPU", f"{text}{f', driver {driver}' if driver else ''}", {"gpus": found, "driver": driver}, problems
    )


def _compilers(torch: Torch | None, ready: dict[str, bool]) -> Section:
    from sglang_pat import jit

    problems, texts = [], []
    facts: dict[str, Any] = {}
    on_gpu = torch is not None and bool(torch.gpus)
    for name, find, pattern in (("g++", jit.find_cxx, r"\b\d+\.\d+\.\d+"), ("nvcc", jit.find_nvcc, r"(?<=, V)[\d.]+")):
        needed = not all(ready[module] for module in ready if module.startswith(jit.PREFIX) == (name == "nvcc"))
        try:
            compiler = find()
            said = _said_by([*compiler.split(), "--version"])
        except (jit.BuildError, ProbeError) as error:
            texts.append(f"no {name}{'' if needed else ', which is not needed here'}")
            facts[name] = None
            if needed:
                problems.append(str(error) if isinstance(error, jit.BuildError) else f"{name}: {error}")
            continue
        number = re.search(pattern, said)
        shown = number[0] if number else said.strip().partition("\n")[0][:LONGEST]
        texts.append(f"{name} {shown} ({compiler})")
        facts[name] = {"version": shown, "at": compiler}
        if on_gpu and name == "nvcc" and torch is not None and torch.cuda and number:
            ours, theirs = number[0].partition(".")[0], torch.cuda.partition(".")[0]
            if ours != theirs:
                problems.append(
                    f"nvcc is of CUDA {ours}, torch of CUDA {theirs}: set CUDA_HOME to a toolkit of CUDA {theirs}"
                )
    return Section("compilers", "; ".join(texts), facts, problems)


def _ready(torch: Torch | None, model: str | None) -> dict[str, bool]:
    """Which native modules a server has here, and whether they are built. Of those of a GPU, what `build` makes."""
    from sglang_pat import jit

    ready = {"planner": jit.is_ready("packing")}
    if torch is None or not torch.gpus:
        return {**ready, "CPU kernels": jit.is_ready("cpu")}
    from sglang_pat.cli import build
    from sglang_pat.model_config import ModelError

    # What is wrong with the model is said elsewhere.
    with contextlib.suppress(ModelError, ValueError):
        for variant in build.variants(model, arch_name(*torch.gpus[0].capability)):
            ready[variant.name] = jit.is_ready_for_cuda(variant.name, variant.arch, variant.flags)
    return ready


def _cache(model: str | None, ready: dict[str, bool]) -> Section:
    from sglang_pat import jit

    try:
        cache = jit.find_cache()
    except jit.BuildError as error:
        return Section("kernel cache", "none", {"folder": None, "usable": False, "ready": {}}, [str(error)])
    of_model = "head dimension 128" if model is None else "this model"
    modules = [name for name in ready if name.startswith(jit.PREFIX)]
    texts = [f"{name} {'ready' if ready[name] else 'not built yet'}" for name in ready if name not in modules]
    if modules:
        texts.append(
            f"{sum(ready[name] for name in modules)} of {len(modules)} modules that `build` makes for {of_model} are ready"
        )
    facts = {"folder": str(cache.folder), "usable": cache.usable, "ready": ready}
    # A folder that was filled ahead may be read-only.
    problems = [cache.problem] if cache.problem and (cache.usable or not all(ready.values())) else []
    state = "writable" if cache.usable else "not writable"
    return Section("kernel cache", f"{cache.folder} ({state}): {', '.join(texts)}", facts, problems)


def _settings(environment: Mapping[str, str] = os.environ) -> Section:
    from sglang_pat.config import KEY, ConfigError, PatConfig
    from sglang_pat.packing import devices

    fields = {f"SGLANG_PAT_{name.upper()}" for name in PatConfig.__struct_fields__}
    shown = {name: environment[name][:LONGEST] for name in sorted(fields | set(ASKED)) if name in environment}
    texts = [f"{name}={value}" for name, value in shown.items()]
    if KEY in environment:
        texts.append(f"{KEY} is set")
    facts = {**shown, "api_key_set": KEY in environment}
    problems = []
    try:
        config = PatConfig.from_environment(environment)
        if config.tiles:
            devices.load(Path(config.tiles), "SGLANG_PAT_TILES")
    except (ConfigError, devices.TablesError) as error:
        problems.append(str(error))
    return Section("settings", ", ".join(texts) or "all have their defaults", facts, problems)


def _model(name: str, torch: Torch | None) -> Section:
    from sglang_pat import model_config
    from sglang_pat.cli import model

    try:
        config = model_config.read(model_config.find(name))
    except model_config.ModelError as error:
        return Section("model", "unknown", {"model": name, "verdicts": {}}, [str(error)])
    gpu = torch.gpus[0] if torch is not None and torch.gpus else None
    places: dict[str, tuple[Any, str]] = {"on this GPU": ("cuda", arch_name(*gpu.capability))} if gpu else {}
    if gpu is None:
        places = {"on a GPU": ("cuda", ""), "on this CPU": ("cpu", "")}
    verdicts = {place: model.judge(config, *of) for place, of in places.items()}
    texts = []
    for verdict, reason in dict.fromkeys(verdicts.values()):
        where = " and ".join(place for place in verdicts if verdicts[place] == (verdict, reason))
        shown = f"as far as config.json says, supported {where}" if verdict == "supported" else f"{verdict} {where}"
        texts.append(f"{shown}: {reason}")
    facts = {place: {"verdict": verdict, "reason": reason} for place, (verdict, reason) in verdicts.items()}
    problems = []
    if all(verdict == "refused" for verdict, _ in verdicts.values()):
        reason = next(iter(verdicts.values()))[1]
        problems.append(f"--attention-backend pat does not support {reason}: serve it with another --attention-backend")
    warnings = []
    if any(verdict == "unknown" for verdict, _ in verdicts.values()):
        warnings.append("whether pat supports this model is not known")
    return Section("model", texts[0], {"model": name, "verdicts": facts}, problems, texts[1:], warnings)


def _server(url: str, key: str) -> Section:
    from sglang_pat.cli.top import TopError, fetch, total

    try:
        counters = total(fetch(url, key))
    except TopError as error:
        return Section("server", "no answer", {}, [str(error)])
    read, unpacked = counters["kv_bytes"], counters["kv_bytes_unpacked"]
    text = f"{counters['steps']:,} decode steps by PAT"
    if unpacked:
        text += f", {1 - read / unpacked:.0%} of KV reads saved"
    text += (
        f", {counters['bound']:,} requests followed, {counters['fallbacks']:,} fallbacks, {counters['faults']:,} faults"
    )
    problems = []
    if counters["unpacked_because"]:
        problems.append(f"nothing is packed: {counters['unpacked_because']}")
    if counters["fallbacks"] or counters["faults"]:
        problems.append("plans failed or were found wrong; its log says why")
    return Section("server", text, counters, problems)


def _torch() -> Torch | str:
    """What torch says, or what is wrong with it."""
    try:
        return msgspec.json.decode(_said_by([sys.executable, "-c", PROBE]).splitlines()[-1], type=Torch)
    except (ProbeError, msgspec.MsgspecError, IndexError) as error:
        return f"cannot be used: {error}"


def _nvidia_smi() -> list[tuple[str, str]]:
    """Name and driver of each GPU that the driver knows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        said = _said_by([program, "--query-gpu=name,driver_version", "--format=csv,noheader"])
    except ProbeError:
        return []
    rows = [line.split(", ") for line in said.splitlines()]
    return [(row[0][:LONGEST], row[1][:LONGEST]) for row in rows if len(row) == 2]


def _said_by(command: Sequence[str]) -> str:
    """The output of a program."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ProbeError(f"{command[0]} cannot be started: {error}") from None
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        # It is not waited for: what hangs in a driver does not end by a signal either.
        raise ProbeError(f"{Path(command[0]).name} does not end within {PATIENCE} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:LONGEST]
        ended = (
            f"ends with status {process.returncode}"
            if process.returncode > 0
            else f"ends by signal {-process.returncode}"
        )
        raise ProbeError(f"{last or 'it says nothing'} ({command[0]} {ended})")
    return output.decode("utf-8", "replace")
