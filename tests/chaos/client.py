"""HTTP as clients misuse it: streams that are left, bodies that never end, ids that others have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

COMPLETE = ("length", "stop")


@dataclass
class Outcome:
    """What came of a request.

    Attributes:
        status: Of HTTP; 0 where no answer began.
        ids: Output ids of each sample, as far as they came.
        texts: The same as text.
        meta: The first sample's `meta_info`; of OpenAI's API its `logprobs`.
        reason: Why generation ended; empty where it is not known to have ended.
        error: What the server said instead.
        left: This client did not wait for the end.
    """

    status: int = 0
    ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    error: str = ""
    left: bool = False

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.reason in COMPLETE and not self.error and not self.left

    def take(self, answer: Any) -> None:
        """Take in an answer, or a chunk of a stream, each of which has everything that came before it."""
        if isinstance(answer, dict) and "choices" in answer:
            self._take_choices(answer["choices"])
            return
        samples = answer if isinstance(answer, list) else [answer]
        if not samples or not all(isinstance(sample, dict) and "meta_info" in sample for sample in samples):
            self.error = str(answer)[:400]
            return
        for i, sample in enumerate(samples):
            index = sample.get("index", i)
            while len(self.ids) <= index:
                self.ids.append([])
                self.texts.append("")
            ids = sample.get("output_ids") or []
            # The last chunk of a stream that was aborted while it waited has its last token alone
            # (`TokenizerManager._handle_abort_req`).
            if len(ids) >= len(self.ids[index]):
                self.ids[index] = ids
            self.texts[index] = sample.get("text") or ""
        self.meta = samples[0]["meta_info"]
        reasons = {(sample["meta_info"].get("finish_reason") or {}).get("type", "") for sample in samples}
        self.reason = "abort" if "abort" in reasons else min(reasons)

    def _take_choices(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            index = choice.get("index", 0)
            while len(self.texts) <= index:
                self.texts.append("")
            if "delta" in choice:
                self.texts[index] += choice["delta"].get("content") or ""
            elif "message" in choice:
                self.texts[index] = choice["message"].get("content") or ""
            else:
                self.texts[index] += choice.get("text") or ""
            self.reason = choice.get("finish_reason") or self.reason
            self.meta = {"logprobs": choice.get("logprobs")}


class Client:
    """Talks to one server, over as many connections as there are requests."""

    def __init__(self, url: str, patience: float = 180) -> None:
        """`patience` is how many seconds an answer may take before the server counts as hung."""
        self.url, self.patience = url, patience
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self.patience)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 22) as self._session:
            yield self

    async def get(self, path: str) -> Any:
        assert self._session is not None
        async with self._session.get(self.url + path) as response:
            return await response.json(content_type=None)

    async def post(self, path: str, body: Any = None, query: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and text; `body` may be bytes."""
        assert self._session is not None
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self.url + path, data=data, headers=headers, params=query) as response:
            return response.status, (await response.read()).decode(errors="replace")

    async def ask(self, path: str, body: dict[str, Any], leave_after: float | None = None) -> Outcome:
        """Send a request; disconnect after so many seconds, whatever has come by then.

        Raises:
            TimeoutError: The server did not answer in time.
            aiohttp.ClientError: It is gone.
        """
        outcome = Outcome()
        task = asyncio.create_task(self._ask(path, body, outcome))
        try:
            await asyncio.wait({task}, timeout=leave_after)
        finally:
            outcome.left = task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            outcome.left = False
            task.result()
        return outcome

    async def _ask(self, path: str, body: dict[str, Any], outcome: Outcome) -> None:
        assert self._session is not None
        async with self._session.post(self.url + path, json=body) as response:
            outcome.status = response.status
            if "event-stream" not in response.headers.get("Content-Type", ""):
                text = (await response.read()).decode(errors="replace")
                try:
                    answer = json.loads(text)
                except ValueError:
                    answer = text
                if response.status == 200:
                    outcome.take(answer)
                else:
                    outcome.error = text[:400]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        outcome.error = str(chunk["error"])[:400]
                    else:
                        outcome.take(chunk)

    async def send_raw(self, path: str, body: bytes, announced: int, pause: float) -> None:
        """Announce `announced` bytes, send half of `body`, wait, send the rest, and hang up without reading."""
        address = urlsplit(self.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {announced}\r\n\r\n".encode() + body[: len(body) // 2])
            await writer.drain()
            await asyncio.sleep(pause)
            writer.write(body[len(body) // 2 :])
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
