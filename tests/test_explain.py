"""`sglang-pat explain`: what the page is made of, and the page itself in a browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from oracle import for_batch, pricing
from trees import batches, configs

from sglang_pat import cli
from sglang_pat.cli.explain import ExplainError, describe, explain, recorded
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, POLICIES, AttentionSpec, Batch, PackConfig, tree
from sglang_pat.packing.native import batch_in
from sglang_pat.radix_bridge import trace
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound, RequestsExpected

pytestmark = pytest.mark.once

TILES = capabilities.tile_table("9.0a", 128)
CONFIG = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"]), TILES, workers=132)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROMPTS = Path(__file__).parent.parent / "docs" / "examples" / "prompts.txt"
CONFIG_JSON = PROMPTS.with_name("config.json")
MARKUP = "<b></script>"
"""Part of request ids, which come from clients."""


def record(path: Path, requests: int, levels: int, plans: int) -> None:
    """A trace of a tree that halves its requests on every level until two are left, and then goes on level by level."""
    writer = trace.TraceWriter(path, trace.Header(trace.FORMAT, CONFIG, requests, 36), 10**9)
    last, node, groups = [ROOT] * requests, 0, [list(range(requests))]
    for level in range(levels):
        if level and len(groups[0]) > 2:
            groups = [half for group in groups for half in (group[::2], group[1::2])]
        for group in groups:
            node += 1
            writer.on_event(NodeInserted(node, last[group[0]], 40, node.to_bytes(16, "little")))
            for query in group:
                last[query] = node
    names = [f"request {query}{MARKUP}" for query in range(requests)]
    writer.on_event(RequestsExpected(list(range(requests)), [0] * requests, names))
    for query in range(requests):
        writer.on_event(RequestBound(query, last[query], 0))
    for plan in range(plans):
        lengths = [40 * levels + 10 + query % 7 + 50 * plan for query in range(requests)]
        writer.on_plan(
            list(range(requests)), steps=50, seq_lens=lengths, kv_tokens=0, parts=0, ahead=False, fallback=False
        )


def chain(path: Path, requests: int) -> None:
    """A trace of a batch in which each request is one node longer than the one before."""
    writer = trace.TraceWriter(path, trace.Header(trace.FORMAT, CONFIG, requests, 36), 10**9)
    for query in range(requests):
        writer.on_event(NodeInserted(query + 1, query or ROOT, 1, query.to_bytes(16, "little")))
        writer.on_event(RequestBound(query, query + 1, 0))
    lengths = list(range(2, requests + 2))
    writer.on_plan(list(range(requests)), steps=0, seq_lens=lengths, kv_tokens=0, parts=0, ahead=False, fallback=False)


def test_a_batch_that_cannot_be_planned_is_one_sentence() -> None:
    dear = msgspec.structs.replace(CONFIG, tiles=msgspec.structs.replace(TILES, token_ns=(1e8,) * 5))
    with pytest.raises(ExplainError, match=r"a batch cannot be planned: .* must be "):
        describe(0, ["a request"], Batch([10]), dear)


@given(batches(), configs())
@settings(max_examples=40, deadline=None)
def test_every_request_and_token_has_one_colour_under_every_policy(batch: Batch, config: PackConfig) -> None:
    names = [f"request {query}" for query in range(len(batch.seq_lens))]
    step = describe(7, names, batch, config)
    assert sorted(step["requests"]) == sorted(names)
    lengths = dict(zip(names, batch.seq_lens, strict=True))
    planned = for_batch(batch, config).for_bins
    assert step["lengths"] == [lengths[name] for name in step["requests"]]
    for policy in POLICIES:
        plan = step["policies"][policy]
        covered = np.zeros((len(names), max(batch.seq_lens)), dtype=int)
        for start, end, _, _, _, runs, _, _ in plan["items"]:
            for first, count in runs:
                covered[first : first + count, start:end] += 1
        if planned.straddled_rows:
            covered = covered.clip(max=1)  # two items may each have some rows of a request
        behind = [max(0, n - config.window) if config.window else 0 for n in step["lengths"]]
        expected = [
            [int(hidden <= i < n) for i in range(covered.shape[1])]
            for hidden, n in zip(behind, step["lengths"], strict=True)
        ]
        assert covered.tolist() == expected
        assert step["minimum"] <= plan["kv_bytes"]
        assert plan["bins"][0] == 0 and plan["bins"][-1] == len(plan["items"])
        for begin, behind in pairwise(plan["bins"]):
            members: list[tuple[int, int, bool, int]] = []
            for start, end, _, m, _, runs, _, tail in plan["items"][begin:behind]:
                queries = sum(n for _, n in runs)
                if tail:
                    # It is drawn behind what its pack shares.
                    members[-1] = (*members[-1][:3], members[-1][3] + end - start)
                else:
                    members.append((queries, end - start, pricing.runs_in_row_slices(planned, queries, m), 0))
            drawn = sum(item[4] + item[6] for item in plan["items"][begin:behind])
            # A bar is the share of one work item of the kernel; its price and its turn are each rounded down to a byte.
            rounded = pricing.bin_price(planned, members) - drawn * config.cost.runs
            assert 0 <= rounded <= 2 * (config.cost.runs - 1) * (behind - begin), "a bin takes as long as its bars"
        assert len(plan["decisions"]) == len(step["nodes"])
    for start, end, first, count in step["nodes"]:
        members = [names.index(name) for name in step["requests"][first : first + count]]
        known = [(p.start, p.end, sorted(p.queries)) for p in tree.compact(batch)]
        assert (start, end, sorted(members)) in known


def test_a_turn_from_wide_items_to_narrow_ones_is_drawn_once_in_a_bin_that_has_both() -> None:
    shared = tree.Node(0, 2048, list(range(64)))
    step = describe(0, [str(i) for i in range(64)], Batch([2048 + 40 * i for i in range(64)], [shared]), CONFIG)
    plan, warp_m = step["policies"]["optimal"], TILES.warp_m
    turns = []
    for begin, behind in pairwise(plan["bins"]):
        members = plan["items"][begin:behind]
        both = {item[3] <= warp_m for item in members} == {True, False}
        turns += [both]
        assert [item[6] for item in members if item[6]] == [CONFIG.for_bins.turn_price // CONFIG.cost.runs] * both
    assert any(turns) and not all(turns) and CONFIG.for_bins.turn_price > 0


def test_a_node_says_what_reading_again_and_splitting_cost() -> None:
    children = [tree.Node(100, 160, [0, 1]), tree.Node(100, 130, [2, 3, 4])]
    batch = Batch([170] * 5, [tree.Node(0, 100, [0, 1, 2, 3, 4], children)])
    step = describe(0, list("abcde"), batch, CONFIG)
    assert step["nodes"] == [[0, 100, 0, 5], [100, 160, 0, 2], [100, 130, 2, 3]]
    part = CONFIG.cost.part_bytes
    # The first split of a query makes two parts of it.
    costs = [[0, 0], [100 * CONFIG.token_price(2), 2 * 2 * part], [100 * CONFIG.token_price(3), 3 * 2 * part]]
    assert step["policies"]["naive"]["decisions"] == [[0, *cost] for cost in costs]
    assert step["policies"]["query"]["decisions"] == [[0, *costs[0]], [1, *costs[1]], [1, *costs[2]]]


def test_a_trace_gives_every_plan_with_its_batch(tmp_path: Path) -> None:
    record(tmp_path / "trace", 16, 3, 5)
    found = list(recorded(tmp_path / "trace"))
    assert [step for _, step, _, _ in found] == [50, 100, 150, 200, 250]
    assert all(len(batch.roots) == 1 and len(batch.roots[0].queries) == 16 for *_, batch in found)


@pytest.mark.parametrize(("plans", "steps", "shown"), [(1, 20, 1), (5, 20, 5), (9, 3, 3), (9, 1, 1)])
def test_the_page_shows_as_many_plans_as_asked_for(tmp_path: Path, plans: int, steps: int, shown: int) -> None:
    record(tmp_path / "trace", 4, 2, plans)
    assert explain(tmp_path / "trace", tmp_path / "page.html", steps) == shown
    page, data = (tmp_path / "page.html").read_text(), read(tmp_path / "page.html")
    assert len(data["steps"]) == shown and data["plans"] == plans
    assert data["steps"][0]["requests"][0].endswith(MARKUP) and MARKUP not in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page), "the page works offline"


def test_the_page_opens_on_the_plan_that_saved_most(tmp_path: Path) -> None:
    """Not on a server's warm-up, and not on a plan of one step. It is shown even if it is none of those that are evenly spread."""
    writer = trace.TraceWriter(tmp_path / "trace", trace.Header(trace.FORMAT, CONFIG, 8, 36), 10**9)
    writer.on_event(NodeInserted(1, ROOT, 500, (1).to_bytes(16, "little")))
    for query in range(8):
        writer.on_event(RequestBound(query, 1, 0))
    # (requests, steps that the plan before was used for)
    for requests, steps in [(1, 0), (8, 10), (3, 2), (4, 20), (8, 90), (2, 3), (1, 5)]:
        numbers = {"kv_tokens": 500 + 10 * requests, "parts": 0}
        lengths = [510] * requests
        writer.on_plan(list(range(requests)), steps=steps, seq_lens=lengths, ahead=False, fallback=False, **numbers)
    for shown, place in ((20, 3), (4, 1), (1, 0)):
        assert explain(tmp_path / "trace", tmp_path / "page.html", shown) == min(shown, 7)
        data = read(tmp_path / "page.html")
        opened = data["steps"][data["open"]]
        assert data["open"] == place and len(opened["requests"]) == 4 and (opened["step"], opened["used"]) == (32, 90)
    assert read(tmp_path / "page.html")["plans"] == 7
    explain(tmp_path / "trace", tmp_path / "page.html")
    assert read(tmp_path / "page.html")["steps"][-1]["used"] is None, "it is not recorded"


def read(page: Path) -> dict:
    """A page's data."""
    return json.loads(re.search(r"^const data = (.*);$", page.read_text(), re.MULTILINE)[1])


def test_a_tree_that_is_too_deep_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its nodes has all requests below it: 8,000 requests that follow one another took minutes, from a file of 1 MB."""
    path, page = tmp_path / "trace", tmp_path / "page.html"
    chain(path, 8_000)
    assert cli.main(["explain", str(path), "--output", str(page)]) == 2 and not page.exists()
    said = "the paths of the batch's 8,000 requests have more than 1,048,576 nodes together, too many for this command"
    assert capsys.readouterr().err == f"sglang-pat: {path}, step 0: {said}\n"
    assert cli.main(["replay", str(path), "--oracle"]) == 2
    assert capsys.readouterr().err == f"sglang-pat: {path} cannot be compared (--oracle): {said}\n"
    monkeypatch.setattr("sglang_pat.packing.native.MOST_NODES", 45)
    chain(path, 9)
    assert explain(path, page) == 1


def test_only_the_trees_of_plans_that_are_shown_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "trace", 4, 2, 9)
    made: list[int] = []
    real = batch_in
    monkeypatch.setattr("sglang_pat.cli.explain.batch_in", lambda *arguments: made.append(1) or real(*arguments))
    assert explain(tmp_path / "trace", tmp_path / "page.html", 3) == len(made) == 3


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_page_is_made_where_others_write_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    """What they put in the way of its first draft is not opened, and no draft stays."""
    record(tmp_path / "trace", 4, 2, 1)
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / f".page.html.{os.getpid()}").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (folder / ".guessed.html").symlink_to(tmp_path / "mine")
    before = os.umask(umask)
    try:
        with pytest.raises(FileExistsError):
            explain(tmp_path / "trace", folder / "page.html")
        monkeypatch.undo()
        assert explain(tmp_path / "trace", folder / "page.html") == 1
    finally:
        os.umask(before)
    assert (tmp_path / "mine").read_text() == "mine" and not (folder / "page.html").is_symlink()
    assert stat.S_IMODE((folder / "page.html").stat().st_mode) == mode
    assert sorted(os.listdir(folder)) == [".guessed.html", f".page.html.{os.getpid()}", "page.html"]


def test_a_job_is_shown_before_it_runs(tmp_path: Path) -> None:
    """In the order of its tree."""
    lines = [{"body": {"prompt": [i % 3] * 64 + [i] * 64, "max_tokens": 8}} for i in range(300)]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, config = tmp_path / "page.html", Path(__file__).parent.parent / "docs" / "examples" / "config.json"
    assert cli.main(["explain", str(tmp_path / "in"), "--model", str(config), "--output", str(page)]) == 0
    data = read(page)
    assert [len(step["requests"]) for step in data["steps"]] == [256, 44] and data["job"]
    names = [name for step in data["steps"] for name in step["requests"]]
    assert sorted(names) == sorted(f"request {i}" for i in range(1, 301))
    assert len([node for node in data["steps"][0]["nodes"] if node[:2] == [0, 63] or node[:2] == [0, 64]]) == 3


def test_a_page_does_not_replace_what_it_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, requests = tmp_path / "config.json", tmp_path / "in"
    shutil.copy(CONFIG_JSON, config)
    requests.write_text("a prompt\n")
    for output, kind in ((config, "model's config.json"), (requests, "input")):
        before = output.read_text()
        assert cli.main(["explain", str(requests), "--model", str(tmp_path), "--output", str(output)]) == 2
        assert output.read_text() == before and f"{output} is the {kind}: name another file" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), pytest.param("dark", 390, marks=pytest.mark.slow)])
def test_the_page_stays_usable_with_1024_requests_and_32_levels(tmp_path: Path, scheme: str, width: int) -> None:
    """On a desktop and on a phone."""
    from playwright.sync_api import sync_playwright

    record(tmp_path / "trace", 1024, 32, 3)
    explain(tmp_path / "trace", tmp_path / "page.html")
    flags = [
        "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": width, "height": 1300}, color_scheme=scheme)
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(f"file://{tmp_path}/page.html")

        def drawn(step: int, policy: str) -> int:
            page.wait_for_function("drawn => document.body.dataset.drawn === drawn", arg=f"{step} {policy}")
            return int(page.evaluate("document.body.dataset.milliseconds"))

        times = [drawn(1, "optimal")]
        assert "after 100 decode steps, 1,024 requests, used for 50 steps" in page.locator("#label").inner_text()
        assert re.match(r"1,024 requests: \d+\.\d . less KV read than", page.locator("#headline").inner_text())
        assert page.evaluate("document.documentElement.scrollWidth") == width, "only the table scrolls sideways"
        ticks = page.locator("#tree .ytick text").all_text_contents()
        assert 5 < len(ticks) <= 11 and all(tick.isdigit() for tick in ticks), ticks
        assert page.evaluate("document.querySelectorAll('#tree .point').length") > 1024
        items = page.locator("#table tr.chosen td").nth(5).inner_text()
        page.select_option("#policy", "naive")
        times.append(drawn(1, "naive"))
        assert page.locator("#table tr.chosen td").first.inner_text() == "naive"
        assert page.locator("#table tr.chosen td").nth(5).inner_text() != items
        page.locator("#step").fill("2")
        times.append(drawn(2, "naive"))
        assert "after 150 decode steps, 1,024 requests" in page.locator("#label").inner_text()
        box = page.locator("#tree .plotly .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + 4, box["y"] + box["height"] / 2)
        page.wait_for_selector("#tree .hovertext")
        hover = page.locator("#tree .hovertext").first.text_content()
        assert "tokens 0 to" in hover and "request " in hover and " tokens)" in hover
        browser.close()
    print(f"drawn in {times} ms")
    assert messages == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a trace or --url"),
        (["there.is.none"], "there.is.none cannot be read"),
        ([str(PROMPTS)], "or give --model for a file of requests"),
        (
            [str(PROMPTS), "--model", str(CONFIG_JSON), "--gpu", "v100"],
            "--gpu v100: there are measurements for h200, h100 only",
        ),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "--model is for a file of requests"),
        (["there.is.none", "--model", "x"], "there.is.none cannot be read"),
        (["--url", "http://127.0.0.1:9"], "no SGLang server answers at http"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments, message: str) -> None:
    assert cli.main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_trace_without_steps_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "trace", 4, 2, 0)
    assert cli.main(["explain", str(tmp_path / "trace"), "--output", str(tmp_path / "page.html")]) == 2
    assert "has no decode step: send the server requests first" in capsys.readouterr().err
