"""Offline jobs on several replicas: prefixes stay together, work is even, and what a server leaves behind is answered by the others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import heapq
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from conftest import flush
from forked import ForkedProcess, ForkedServer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import FLAGS, chat, choice, completion, job, requests_of, until

from sglang_pat import cli, compat
from sglang_pat.batch import servers
from sglang_pat.batch.job import LateError, LostError, StoppedError, answer_all, in_time
from sglang_pat.batch.lengths import Usage
from sglang_pat.batch.lines import BatchError, Request
from sglang_pat.batch.order import Room
from sglang_pat.batch.shares import Shares, cut
from sglang_pat.batch.tree import Tree, limit_of
from sglang_pat.demo import workload


@pytest.mark.once
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.floats(0, 0.5),
)
@settings(deadline=None)
def test_a_cut_separates_the_least_within_its_slack(found: list[tuple[int, int]], aim: float, slack: float) -> None:
    steps, costs = [step for step, _ in found], [cost for _, cost in found]
    aim, slack = aim * sum(costs), slack * sum(costs)
    place = cut(steps, costs, aim, slack)
    off = [abs(sum(costs[:i]) - aim) for i in range(len(costs) + 1)]
    twice = [0, *steps[1:], 0]
    near = [i for i in range(len(off)) if off[i] <= slack]
    if place in near:
        assert twice[place] == min(twice[i] for i in near)
    else:
        assert all(twice[i] for i in near), "it separates nobody within the slack"
        assert all(twice[i] > twice[place] or off[i] >= off[place] for i in range(len(off)))


prompts = st.lists(st.text("ab", max_size=6), min_size=1, max_size=24)


@pytest.mark.once
@given(
    prompts,
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_each_request_is_answered_once_whoever_is_lost(
    prompts: list[str], replicas: int, window: int, shared: int, pool: int, random: Any
) -> None:
    shares = Shares(Tree(requests_of(prompts), shared), [Room(pool)] * replicas, window)
    running: list[tuple[int, int]] = []
    answered: list[int] = []
    while True:
        while (taken := shares.take()) is not None:
            running.append(taken)
        assert all(count <= window for count in Counter(replica for replica, _ in running).values())
        if not running:
            break
        if len(shares.living) > 1 and random.random() < 0.1:
            lost = random.choice(shares.living)
            shares.lose(lost)
            running = [one for one in running if one[0] != lost]
            continue
        replica, rank = running.pop(random.randrange(len(running)))
        shares.finish(replica, rank, Usage(3, 5))
        answered.append(rank)
    assert sorted(answered) == list(range(len(prompts)))


def handed_out(shares: Shares) -> dict[int, list[int]]:
    """What each replica gets, before anybody has nothing left."""
    return {replica: sorted(order.waiting) for replica, order in enumerate(shares._orders)}


@pytest.mark.once
@given(st.integers(2, 4), st.integers(30, 60), st.integers(1, 8))
@settings(deadline=None)
def test_groups_stay_whole_and_shares_are_even(replicas: int, groups: int, members: int) -> None:
    """As long as there are groups enough to choose from."""
    tree = Tree(
        requests_of([f"{group:02}{'x' * 2000}{member}" for group in range(groups) for member in range(members)])
    )
    shares = Shares(tree, [Room()] * replicas, 1024)
    given_to = handed_out(shares)
    assert sorted(rank for ranks in given_to.values() for rank in ranks) == list(range(groups * members))
    for ranks in given_to.values():
        assert all(count == members for count in Counter(rank // members for rank in ranks).values())
    assert max(shares._left) <= 1.3 * sum(shares._left) / replicas


@pytest.mark.once
def test_a_group_that_all_share_is_divided_where_it_forks() -> None:
    system = "s" * 4000
    found = [f"{system}{tool * 3000}{question}" for tool in "abcd" for question in range(25)]
    given_to = handed_out(Shares(Tree(requests_of(found)), [Room()] * 2, 1024))
    assert sorted(map(len, given_to.values())) == [50, 50]


@pytest.mark.once
def test_a_faster_replica_takes_more() -> None:
    """Of three that take 1, 1 and 3 units of time for a request, all end at about the same time, whatever was expected."""
    tree = Tree(requests_of([f"{group:02}{'x' * 2000}{member}" for group in range(30) for member in range(100)]))
    shares = Shares(tree, [Room()] * 3, 16)
    events: list[tuple[int, int, int]] = []
    now, ends = 0, {}
    while True:
        while (taken := shares.take()) is not None:
            heapq.heappush(events, (now + (1, 1, 3)[taken[0]], *taken))
        if not events:
            break
        now, replica, rank = heapq.heappop(events)
        ends[replica] = now
        shares.finish(replica, rank, Usage(3, 5))
    ideal = 3000 / 16 / (1 + 1 + 1 / 3)
    assert now < 1.1 * ideal
    assert max(ends.values()) - min(ends.values()) <= 6


@pytest.mark.once
@pytest.mark.parametrize(("limit", "helps"), [(500, True), (100, False)])
def test_an_idle_replica_helps_one_that_is_full_if_that_saves_more_than_the_prefix(limit: int, helps: bool) -> None:
    """Of two groups of 12 with 2,000 tokens in common; one is answered at once. What waits for a prefix that is being computed stays."""
    body = {"max_tokens": limit}
    found = [
        Request(i, str(i), "/v1/completions", {"prompt": f"{group}{'x' * 8000}{i:02}", **body})
        for group in range(2)
        for i in range(12)
    ]
    shares = Shares(Tree(found), [Room()] * 2, 4)
    given_to = handed_out(shares)
    assert [len(ranks) for ranks in given_to.values()] == [12, 12]
    running: list[int] = []

    def go_on() -> None:
        while (taken := shares.take()) is not None:
            if taken[1] in given_to[0]:
                running.append(taken[1])
            else:
                shares.finish(*taken, Usage(2000, 1))

    go_on()
    assert len(running) == 1 and len(shares._orders[0].waiting) == 11
    shares.finish(0, running.pop(), Usage(2000, limit))
    go_on()
    elsewhere = len(running) - len(shares._orders[0].running)
    assert len(shares._orders[0].running) == 4 and (elsewhere > 0) == helps


@pytest.mark.once
@pytest.mark.parametrize("limit", [-5, 0, 10**30, True, 1.5, "many", None, [], float("nan")])
def test_any_limit_of_an_answer_has_a_cost(limit: Any) -> None:
    for url in ("/v1/completions", "/v1/chat/completions"):
        body = {"max_tokens": limit, "n": limit, "prompt": "x"}
        assert 1 <= limit_of(Request(1, "", url, body)) <= 2**24


@pytest.mark.once
def test_several_prompts_have_as_many_answers() -> None:
    def limit(prompt: Any, **body: Any) -> int:
        return limit_of(Request(1, "", "/v1/completions", {"prompt": prompt, "max_tokens": 100, **body}))

    assert limit(["a", "b", "c"]) == limit([[1], [2], [3]]) == limit("a", n=3) == 300
    assert limit([1, 2, 3]) == limit("abc") == limit([]) == 100
    assert limit(["a"] * 10**5, n=10**5) == 4096 * 100


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--url", "nonsense"],
            "--url must be like http://127.0.0.1:30000, without user, path or query: number 1 is not",
        ),
        (["--url", "http://a:1", "--url", "http://a:99999"], "number 2 is not"),
        (["--url", "http://user:secret@a:1"], "number 1 is not"),
        (["--url", "http://a:1/v2"], "number 1 is not"),
        (["--url", "file:///etc/passwd"], "number 1 is not"),
        (["--url", "http://a:1\n"], "number 1 is not"),
        (["--url", "http://[::1"], "number 1 is not"),
        (["--url", ""], "number 1 is not"),
        (["--url", "http://a:1", "--url", "HTTP://A:1/v1/"], "a server is named twice"),
        (["--url", "http://a:1", "--api-key", "ä"], "an API key has printable ASCII characters only"),
        (
            ["--url", "http://a:1", "--model-path", "x"],
            "--model-path is none of this command's flags, and an engine of the job's own",
        ),
    ],
)
def test_careless_addresses_end_with_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "in").write_text(json.dumps(completion("x")) + "\n")
    assert cli.main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "secret" not in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists(), "a mistake leaves nothing behind"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEEP = "[" * 990 + "]" * 990


class Strange:
    """A server that answers as it is told, and else as it should."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers
        self.asked: list[str] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if request.method == "POST":
            body = await request.json()
            self.asked.append(body["prompt"])
            name = body["prompt"] if body["prompt"] in self._handlers else "post"
        if name in self._handlers:
            return await self._handlers[name](request)
        return web.json_response({"data": [], "id": "x", "choices": [{"text": "fine"}]})

    async def start(self) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()


def says(status: int, text: str, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    return handler


async def drops(request: web.Request) -> web.Response:
    assert request.transport
    request.transport.abort()
    return web.Response()


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices":')
    assert request.transport
    request.transport.close()
    return response


async def never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 4096)


async def waits(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


def ask(
    strange: list[Strange], count: int = 12, names: tuple[str, ...] = (), seconds: float = 60
) -> tuple[list[dict[str, Any]], list[str]]:
    """Records and warnings; an answer may take so many seconds."""
    records: list[dict[str, Any]] = []
    warnings: list[str] = []

    async def work() -> None:
        urls = [await one.start() for one in strange]
        try:
            async with servers.connect(urls, "key") as connected:
                replicas = [in_time(one, seconds, url) for one, url in zip(connected, urls, strict=True)]
                found = requests_of([f"p{i}" for i in range(count)] + list(names))
                await answer_all(found, replicas, records.append, 4, warn=warnings.append)
        finally:
            for one in strange:
                await one.stop()

    asyncio.run(asyncio.wait_for(work(), 30))
    return records, warnings


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PAUSES", (0.01,) * 5)
    monkeypatch.setattr(servers, "FULL", 0.3)
    monkeypatch.setattr(servers, "WATCH", 0.05)
    monkeypatch.setattr(servers, "PATIENCE", 0.3)
    monkeypatch.setattr(servers, "LONGEST", 1 << 20)


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("info", "room"),
    [
        (says(200, '{"max_total_num_tokens": 500}'), Room(500)),
        (says(200, '{"max_total_num_tokens": "many"}'), Room()),
        (says(200, "<html>"), Room()),
        (says(200, DEEP * 2), Room()),
        (says(404, '{"max_total_num_tokens": 500}'), Room()),
        (drops, Room()),
        (breaks_off, Room()),
        (waits, Room()),
        (never_ends, Room()),
    ],
)
def test_whatever_a_server_says_of_its_room_is_no_failure(info: Handler, room: Room) -> None:
    async def look() -> Room:
        strange = Strange(server_info=info)
        try:
            async with servers.connect([await strange.start()], "key") as (server,):
                return await server.room()
        finally:
            await strange.stop()

    assert asyncio.run(asyncio.wait_for(look(), 30)) == room


@pytest.mark.once
def test_a_replica_that_answers_others_is_not_probed() -> None:
    """One request has no answer in time, and is the only one that says so."""
    probed: list[Request] = []

    async def ask(request: Request) -> tuple[int, Any]:
        if "max_tokens" in request.body and request.body["prompt"] == "Hello":
            probed.append(request)
        if request.body["prompt"] == "slow":
            await asyncio.sleep(60)
        return 200, {}

    async def work(others: int) -> None:
        one = in_time(ask, 0.2, "it")
        slow = asyncio.ensure_future(one(requests_of(["slow"])[0]))
        await asyncio.sleep(0)
        for _ in range(others):
            assert await one(requests_of(["fast"])[0]) == (200, {})
        with pytest.raises(LateError, match=r"no answer within 0\.2 s"):
            await slow

    asyncio.run(work(others=1))
    assert not probed
    asyncio.run(work(others=0))
    assert len(probed) == 1


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        (
            {"models": says(404, "<html>")},
            "its /v1/models, with status 404, is not that of an OpenAI-compatible server",
        ),
        ({"models": says(200, "<html>")}, "is not that of an OpenAI-compatible server"),
        ({"models": says(200, DEEP * 2)}, "is not that of an OpenAI-compatible server"),
        ({"models": says(302, "", Location="http://127.0.0.1:9/")}, "with status 302, is not that of"),
        ({"models": says(401, "{}")}, "it wants another API key"),
        ({"models": drops}, "disconnected"),
        ({"models": waits}, "no answer within"),
        ({"models": never_ends}, "an answer is longer than 1 MiB"),
        ({"post": drops}, "disconnected"),
        ({"post": drops, "health": says(503, "")}, "its /health says 503"),
        ({"post": breaks_off}, "is lost: "),
        ({"post": never_ends}, "an answer is longer than 1 MiB"),
        ({"post": says(200, "<html>")}, "an answer with status 200 is no JSON object"),
        ({"post": says(200, "\xff")}, "an answer with status 200 is no JSON object"),
        ({"post": says(200, "[]")}, "an answer with status 200 is no JSON object"),
        ({"post": says(200, f'{{"choices":{DEEP}}}')}, "an answer with status 200 is no JSON object"),
        ({"post": says(200, "{}")}, "an answer with status 200 has no choices"),
        ({"post": says(302, "{}", Location="http://127.0.0.1:9/")}, "an answer with status 302 has no choices"),
        ({"post": says(503, "{}")}, "it says 503 to requests"),
        ({"post": says(502, "<html>")}, "it says 502 to requests"),
        ({"post": says(500, "{}"), "health": says(503, "")}, "its /health says 503"),
        # None is idle sooner than one that refuses everything: it would get the whole job.
        ({"post": says(500, "{}")}, "it says 500 to requests"),
        ({"post": says(401, "{}")}, "it says 401 to requests"),
        ({"post": says(404, "{}")}, "it says 404 to requests"),
        ({"post": waits, "health": waits}, "no answer within"),
        ({"post": waits, "health": says(503, "")}, "its /health says 503"),
    ],
)
def test_a_server_that_is_none_or_fails_is_left_to_the_others(handlers: dict[str, Handler], message: str) -> None:
    records, warnings = ask([Strange(**handlers), good := Strange()])
    assert sorted(one["id"] for one in records) == sorted(f"batch_req_{i}" for i in range(1, 13))
    assert all(one["response"]["status_code"] == 200 for one in records)
    assert len(warnings) == 1 and message in warnings[0] and warnings[0].endswith("; its requests go to the others")
    assert len(good.asked) == 12
    with pytest.raises(BatchError) as raised:
        ask([Strange(**handlers)])
    assert message in str(raised.value)
    assert str(raised.value).endswith("; 12 requests have no answer yet: run the same command to go on")


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("handler", "status", "message"),
    [
        (says(400, '{"error": {"message": "no"}}'), 400, "no"),
        (says(413, "<html>too large"), 413, "<html>too large"),
        (says(400, DEEP), 400, "[[["),
        (says(500, '{"error": {"message": "no"}}'), 500, "no"),
        (drops, None, "disconnected"),
        (says(200, "<html>"), None, "no JSON object"),
        (says(504, ""), None, "it says 504"),
    ],
)
def test_a_request_that_fails_alone_is_an_error_of_its_own(
    handler: Handler, status: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "PATIENCE", 10)  # nothing here waits, unless the machine is busy

    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.01)
        return web.json_response({"choices": []})

    records, warnings = ask([Strange(bad=handler, post=slowly), Strange(post=slowly)], 80, ("bad",))
    assert not warnings
    by_number = {one["id"]: one for one in records}
    assert len(records) == len(by_number) == 81
    bad = by_number.pop("batch_req_81")
    assert bad["custom_id"] == "81"
    if status is None:
        assert bad["error"]["code"] == "server_error" and message in bad["error"]["message"]
    else:
        assert bad["response"]["status_code"] == status and message in bad["response"]["body"]["error"]["message"]
    assert all(one["response"]["status_code"] == 200 for one in by_number.values())


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("handler", [says(404, "{}"), says(500, "{}"), says(502, ""), says(200, "<html>"), drops])
def test_a_request_that_fails_is_no_reason_to_lose_a_server_that_has_no_other(handler: Handler) -> None:
    """As when a job is started again that had come to it: else it would never end."""
    models = says(200, '{"data": [{"id": "its own"}]}')
    records, warnings = ask([Strange(bad=handler, models=models)], 0, ("bad",))
    assert len(records) == 1 and not warnings
    assert records[0]["response"] is None or records[0]["response"]["status_code"] >= 400


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("handler", [says(500, "{}"), says(200, "<html>"), drops])
def test_what_a_server_fails_at_once_it_has_broken_goes_to_the_others(handler: Handler) -> None:
    answered = 0

    async def breaks(request: web.Request) -> web.StreamResponse:
        nonlocal answered
        await asyncio.sleep(0.02)
        answered += 1
        return await handler(request) if answered > 6 else web.json_response({"choices": []})

    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.json_response({"choices": []})

    records, warnings = ask([Strange(post=breaks), Strange(post=slowly)], 60)
    assert len(records) == 60 and len(warnings) == 1
    assert all(one["response"]["status_code"] == 200 for one in records)


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_request_that_is_never_answered_is_given_up() -> None:
    """By itself where the server answers others, if only when asked; where it does not, its requests go to another."""
    records, warnings = ask([Strange(bad=waits)], 12, ("bad",), 0.5)
    assert not warnings and len(records) == 13
    bad = [one for one in records if one["error"]]
    assert [(one["id"], one["error"]["code"]) for one in bad] == [("batch_req_13", "timeout")]
    assert bad[0]["error"]["message"] == "line 13: no answer within 0.5 s"
    records, warnings = ask([Strange(bad=waits)], 0, ("bad",), 0.5)
    assert [one["error"]["code"] for one in records] == ["timeout"] and not warnings
    # Long enough for the other one on a busy machine.
    records, warnings = ask([Strange(post=waits), Strange()], 12, (), 2)
    assert len(records) == 12 and not any(one["error"] for one in records)
    assert (
        len(warnings) == 1 and "is lost: it has answered nothing for 2 s; its requests go to the others" in warnings[0]
    )
    with pytest.raises(
        BatchError, match=r"answered nothing for 0\.5 s; 12 requests have no answer yet: run the same command"
    ):
        ask([Strange(post=waits)], 12, (), 0.5)


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_queue_that_is_full_behind_a_long_answer_is_waited_for() -> None:
    running = 0

    async def full(request: web.Request) -> web.Response:
        nonlocal running
        if running:
            return web.Response(status=429)
        running += 1
        await asyncio.sleep(0.2)  # more than all PAUSES
        running -= 1
        return web.json_response({"choices": []})

    records, warnings = ask([Strange(post=full)], 4)
    assert len(records) == 4 and not warnings
    assert all(one["response"]["status_code"] == 200 for one in records)


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "first",
    [
        says(408, ""), says(529, ""), says(503, '{"message": "Request waiting timeout reached."}'),
        says(500, "{}", **{"Retry-After": "0"}), says(413, "", **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        says(200, '{"choices": [{"text": "unfin", "finish_reason": "abort"}]}'),
    ],
)  # fmt: skip
def test_whoever_asks_for_patience_is_asked_again(first: Handler) -> None:
    seen: set[str] = set()

    async def post(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        if prompt in seen:
            return web.json_response({"choices": [{"text": "whole"}]})
        seen.add(prompt)
        return await first(request)

    records, warnings = ask([Strange(post=post)], 6)
    assert [one["response"]["body"]["choices"][0]["text"] for one in records] == ["whole"] * 6 and not warnings


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("status", [400, 403, 422])
def test_what_is_refused_for_good_is_not_asked_again(status: int) -> None:
    """Whatever a proxy adds to it."""
    records, warnings = ask([strange := Strange(odd=says(status, "{}", **{"Retry-After": "0"}))], 3, ("odd",))
    assert [one["response"]["status_code"] for one in records if one["custom_id"] == "4"] == [status] and not warnings
    assert strange.asked.count("odd") == 1


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (says(503, '{"message": "Using priority is disabled for this server. Please"}'), "Using priority is disabled"),
        (says(503, '{"message": "Request running timeout reached."}'), "Request running timeout reached."),
        (says(503, '{"message": "never"}'), "never"),
        (says(200, '{"choices": [{"text": "unfin", "finish_reason": "abort"}]}'), "an answer was aborted"),
    ],
)
def test_what_is_refused_again_and_again_costs_only_itself(answer: Handler, found: str) -> None:
    """Also when no other is asked: the server takes others."""
    records, warnings = ask([strange := Strange(odd=answer)], 3, ("odd",))
    wrong = [one for one in records if one["error"] or one["response"]["status_code"] != 200]
    assert len(records) == 4 and [one["custom_id"] for one in wrong] == ["4"] and not warnings
    assert found in str(wrong[0])
    assert strange.asked.count("odd") < 60


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_requests_that_are_refused_for_good_do_not_wait_for_each_other() -> None:
    """Four are in flight: each four share a probe, which is no sign that the queue moves."""
    records, warnings = ask([strange := Strange(odd=says(429, "{}"))], 3, ("odd",) * 8)
    assert Counter(one["response"]["status_code"] for one in records) == {200: 3, 429: 8} and not warnings
    assert strange.asked.count("Hello") <= 4


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_request_that_is_refused_and_fails_in_turn_is_asked_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PAUSES", (0.001, 0.1, 0.1, 0.1, 0.1))
    turns = itertools.cycle([says(502, ""), says(503, "{}")])

    async def alternates(request: web.Request) -> web.StreamResponse:
        return await next(turns)(request)

    records, warnings = ask([strange := Strange(odd=alternates)], 0, ("odd",))
    assert [one["response"]["status_code"] for one in records] == [503] and not warnings
    assert strange.asked.count("odd") <= 10


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_retry_after_with_what_is_no_full_queue_counts_a_few_times() -> None:
    records, warnings = ask([strange := Strange(odd=says(413, "{}", **{"Retry-After": "0"}))], 0, ("odd",))
    assert [one["response"]["status_code"] for one in records] == [413] and not warnings
    assert strange.asked == ["odd"] * 6


@pytest.mark.once
@pytest.mark.parametrize(("said", "seconds"), [("7", 7), ("soon", None), ("-1", None), ("9" * 400, None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)])  # fmt: skip
def test_what_retry_after_says(said: str, seconds: float | None) -> None:
    assert servers._seconds(said) == seconds and servers._seconds(None) is None


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("garbage", [b"\x1b[2J\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"])
def test_what_speaks_no_http_is_named_in_one_line(garbage: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)
        await writer.drain()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, servers.connect([url], "") as replicas:
            await answer_all(requests_of(["x"]), replicas, lambda record: None)

    with pytest.raises(BatchError, match="is lost: what it sends is no HTTP; 1 requests have no answer yet"):
        asyncio.run(asyncio.wait_for(work(), 30))


@contextlib.contextmanager
def beside(strange: Strange) -> Iterator[str]:
    """Its address; it runs in another thread, for the command wants this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(strange.start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(strange.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_job_that_lost_all_servers_goes_on_with_others(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also one whose requests have all the same name."""
    asked = [{**completion(f"p{i}"), "custom_id": "same"} for i in range(30)]
    (tmp_path / "in").write_text("".join(json.dumps(one) + "\n" for one in asked))
    out = tmp_path / "out"
    answered = 0

    async def dies(request: web.Request) -> web.StreamResponse:
        nonlocal answered
        answered += 1
        return await drops(request) if answered > 9 else web.json_response({"choices": []})

    arguments = ["batch", str(tmp_path / "in"), str(out), "--in-flight", "4", "--url"]
    with beside(Strange(post=dies)) as url:
        assert cli.main([*arguments, url, "--url", "http://127.0.0.1:1"]) == 2
    told = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "sglang-pat" in line]
    assert told[0] == "sglang-pat: http://127.0.0.1:1 is lost: Connection refused; its requests go to the others"
    assert told[1:] == [
        f"sglang-pat: {url} is lost: Server disconnected; 21 requests have no answer yet: run the same command to go on"
    ]
    before = out.read_bytes()
    assert before.count(b"\n") == 9
    with beside(other := Strange()) as url:
        assert cli.main([*arguments, url]) == 0
    assert out.read_bytes().startswith(before)
    assert len(other.asked) == 21
    assert {json.loads(line)["id"] for line in out.read_text().splitlines()} == {f"batch_req_{i}" for i in range(1, 31)}


@pytest.mark.once
@pytest.mark.usefixtures("hasty")
def test_a_server_whose_queue_is_full_is_asked_again() -> None:
    running = 0

    async def full(request: web.Request) -> web.Response:
        nonlocal running
        if running:
            return web.Response(status=503)
        running += 1
        await asyncio.sleep(0.03)
        running -= 1
        return web.json_response({"choices": []})

    records, warnings = ask([Strange(post=full)], 30)
    assert len(records) == 30 and not warnings
    assert all(one["response"]["status_code"] == 200 for one in records)


def urls_job(folder: Path, out: str, *flags: str) -> ForkedProcess:
    command = [sys.executable, "-m", "sglang_pat.cli", "batch", str(folder / "in"), str(folder / out), *flags]
    return ForkedProcess(command, dict(os.environ), folder / f"{out}.log")


@pytest.mark.slow
@pytest.mark.server
def test_a_job_in_a_small_pool_that_is_killed_ten_times(model: Path, tmp_path: Path) -> None:
    """Prefixes are three times the pool, and each is computed once; answers are the same in whatever order and however often it is killed."""
    numbers = random.Random(0)
    asked = []
    for group in range(8):
        prefix = numbers.choices(range(40, 120), k=400)
        for member in range(4):
            own = numbers.choices(range(40, 120), k=24)
            asked.append({**completion(prefix + own, max_tokens=4), "custom_id": f"{group} {member}"})
    once = 8 * 400 + 32 * 24
    numbers.shuffle(asked)
    (tmp_path / "in").write_text("".join(json.dumps(one) + "\n" for one in asked))
    flags = ["--dtype", "float32", "--max-total-tokens", "1100", "--enable-cache-report"]

    def prefilled(bodies: Iterable[dict[str, Any]]) -> int:
        usage = [body["usage"] for body in bodies]
        return sum(one["prompt_tokens"] - (one["prompt_tokens_details"] or {}).get("cached_tokens", 0) for one in usage)

    with ForkedServer(model, "pat", tmp_path / "server.log", flags) as server:
        server.wait()
        with ThreadPoolExecutor(8) as pool:
            shuffled = list(pool.map(lambda one: server.post(one["url"], one["body"]), asked))
        flush(server)
        log = tmp_path / "whole.log"
        assert urls_job(tmp_path, "whole", "--url", server.url).wait(300) == 0, log.read_text()[-3000:]
        ending = (
            rf"all {len(asked)} records are there, 0 of them errors; [\d.]+ s, \d+ tokens/s, \d+% of prefill saved\Z"
        )
        assert re.search(ending, log.read_text().splitlines()[-1]), log.read_text()[-3000:]
        found = answers(tmp_path / "whole", len(asked))
        whole = {name: choice(body) for name, body in found.items()}
        assert whole == {f"batch_req_{i}": choice(body) for i, body in enumerate(shuffled, 1)}
        # Prompts may begin alike by chance.
        assert once - 32 * 2 <= prefilled(found.values()) <= once
        assert prefilled(shuffled) > 1.5 * once, "it is worth something"

        out, log = tmp_path / "out", tmp_path / "out.log"
        for kill in range(10):
            before = out.read_bytes().count(b"\n") if out.exists() else 0
            process = urls_job(tmp_path, "out", "--url", server.url, "--in-flight", "2")
            while not out.exists() or out.read_bytes().count(b"\n") <= before:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # In the middle of a record.
            os.truncate(out, out.stat().st_size - 7 * (kill % 3))
        assert urls_job(tmp_path, "out", "--url", server.url).wait(300) == 0, log.read_text()[-3000:]
        assert {name: choice(body) for name, body in answers(out, len(asked)).items()} == whole


GROUPS, MEMBERS = 4, 6


def grouped(folder: Path) -> None:
    """A file of questions about documents, none of which is like another."""
    documents = [workload.prose(f"document {group}", 1200) for group in range(GROUPS)]
    asked = [chat(f"{documents[i % GROUPS]} question {i // GROUPS}", max_tokens=6) for i in range(GROUPS * MEMBERS)]
    (folder / "in").write_text("".join(json.dumps(one) + "\n" for one in asked))


def answers(path: Path, count: int = 0) -> dict[str, dict[str, Any]]:
    """Records by id, each once and none an error."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    result = {one["id"]: one["response"]["body"] for one in records}
    assert len(records) == len(result) == (count or GROUPS * MEMBERS)
    assert all(one["response"]["status_code"] == 200 for one in records)
    return result


def assert_each_document_computed_once(bodies: dict[str, dict[str, Any]]) -> None:
    """But for what one of its questions has behind it, each was in the cache for all who came later."""
    cold = 0
    for body in bodies.values():
        usage = body["usage"]
        details = usage["prompt_tokens_details"]
        cold += (details["cached_tokens"] if details else 0) < usage["prompt_tokens"] / 2
    assert cold == GROUPS


@pytest.mark.server
def test_a_server_that_is_killed_leaves_its_groups_to_another(model: Path, tmp_path: Path) -> None:
    """Also when the job is ended and started again, with the dead server's address still there."""
    grouped(tmp_path)
    flags = [*FLAGS, "--enable-cache-report"]
    one_thread = {"OMP_NUM_THREADS": "1"}  # two servers share the cores
    with (
        ForkedServer(model, "pat", tmp_path / "one.log", flags, one_thread) as one,
        ForkedServer(model, "pat", tmp_path / "two.log", flags, one_thread) as two,
    ):
        one.wait()
        two.wait()
        urls = ["--url", one.url, "--url", f"{two.url}/v1"]
        assert urls_job(tmp_path, "whole", *urls).wait(300) == 0, (tmp_path / "whole.log").read_text()[-3000:]
        whole = answers(tmp_path / "whole")
        assert_each_document_computed_once(whole)
        for server in (one, two):
            flush(server)
        out, log = tmp_path / "out", tmp_path / "out.log"
        process = urls_job(tmp_path, "out", *urls, "--in-flight", "2")
        until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4, process, log)
        one.stop()
        until(lambda: "is lost" in log.read_text(), process, log)
        assert f"sglang-pat: {one.url} is lost: Connection refused; its requests go to the others" in log.read_text()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 2, log.read_text()[-3000:]
        assert "the job was told to end" in log.read_text()
        assert "Traceback" not in log.read_text()
        done = out.read_bytes().count(b"\n")
        assert 4 <= done < GROUPS * MEMBERS
        assert urls_job(tmp_path, "out", *urls).wait(300) == 0, log.read_text()[-3000:]
        assert "of prefill saved" in log.read_text()
        assert {name: choice(body) for name, body in answers(out).items()} == {
            name: choice(body) for name, body in whole.items()
        }


@pytest.mark.server
def test_groups_stay_on_one_replica_of_an_engine(model: Path, tmp_path: Path) -> None:
    grouped(tmp_path)
    # 0.5.23 wants a NUMA node for each replica, or to be told its cores.
    cores = {} if compat.release() == "0.5.17" else {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    process = job(model, tmp_path, "--dp-size", "2", **cores)
    assert process.wait(600) == 0, (tmp_path / "log").read_text()[-3000:]
    assert_each_document_computed_once(answers(tmp_path / "out"))


def test_no_more_is_asked_at_a_time_than_there_may_be_connections() -> None:
    """Too many open files here are no fault of a server's."""
    code = (
        "import resource; from sglang_pat.batch import servers\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300)); print(servers.in_flight_at_most(1024, 4), servers.in_flight_at_most(7, 4))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); servers.in_flight_at_most(1, 1)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "43 7\n"
    assert result.stderr.splitlines()[-1].endswith("this process may open 100 files only: raise `ulimit -n` to 129")


def test_who_cannot_be_asked_for_lack_of_files_is_not_lost() -> None:
    class Session:
        def request(self, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    server = servers.Server(Session(), "http://127.0.0.1:1")  # type: ignore[arg-type]
    assert asyncio.run(server._sick()) == ""


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_for_one_token_is_waited_for_unless_others_are_answered(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in a full queue."""

    async def never(*_: Any) -> Any:
        server._taken += others
        await asyncio.sleep(60)

    monkeypatch.setattr(servers, "PROBE", 0.05)
    server = servers.Server(None, "http://127.0.0.1:1")  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_fetch", never)
    reason = asyncio.run(server._refusal("/v1/completions", 0))
    assert reason == ("" if others else "no answer to a request for one token within 0.05 s")


def test_a_request_that_is_to_be_asked_once_more_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose queue is full has not taken it."""

    async def full(*_: Any) -> tuple[int, bytes, None]:
        return 429, b"", None

    async def ask() -> None:
        server = servers.Server(None, "http://127.0.0.1:1", lambda: True)  # type: ignore[arg-type]
        monkeypatch.setattr(server, "_fetch", full)
        server._known.set()
        (request,) = requests_of(["a"])
        await server._ask(request)

    with pytest.raises(StoppedError):
        asyncio.run(ask())


def test_what_nobody_waits_for_any_more_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may fail while it is being cancelled: `wait_for` gives what came just then."""
    reported: list[Any] = []

    async def fail(_: Request) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise LostError("gone") from None

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        server = servers.Server(None, "http://127.0.0.1:1")  # type: ignore[arg-type]
        server._watcher = asyncio.ensure_future(asyncio.sleep(60, ""))
        monkeypatch.setattr(server, "_ask", fail)
        (request,) = requests_of(["a"])
        asked = asyncio.ensure_future(server(request))
        for _ in range(3):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        server.close()
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(ask())
    gc.collect()
    assert not reported
