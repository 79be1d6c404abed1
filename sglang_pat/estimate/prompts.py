"""The workload: requests from a file, and the prefix tree of a batch of them."""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sglang_pat import jsonl
from sglang_pat.estimate.agentic import KEPT_BLOCK, Session, session_of
from sglang_pat.estimate.errors import EstimateError, fault
from sglang_pat.packing import Batch, Node
from sglang_pat.radix_bridge.events import Tokens

CHARS_PER_TOKEN = 4
"""For English text with the usual vocabularies. Not needed for prompts given as tokens or lengths."""
BLOCK = 16
"""Tokens in a block; prefixes are compared block by block."""
TRACE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
TRACE_BLOCKS = (TRACE_BLOCK, *(1 << power for power in reversed(range(17)) if 1 << power != TRACE_BLOCK))
"""The same of all traces that are read, the likeliest first: others have pages of a cache, 16 tokens in the Qwen-Bailian traces."""
LONGEST = 1 << 27
"""The most bytes in a line."""
LOGGED = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (?=\{)")
"""What SGLang puts in front of each line of its request log, and of nothing else."""
LOGGED_AS_TEXT = re.compile(r"\[[-\d]+ [:\d]+\] Receive: obj=")
"""The same with --log-requests-format text, the default."""
LOGGED_PART = 2048
"""How many characters (or tokens) of a prompt --log-requests-level 2 keeps: half from its start, then `...`, then half from its end."""
WHOLE = "SGLang logs whole prompts with --log-requests-level 3"
KNOWN = ("prompt", "messages", "text", "input_ids", "hash_ids", "turns")
"""The keys by which a line is a request."""
LISTED = 8
"""The most keys that an error names."""
LONGEST_KEY = 40
"""The most characters of a key that it shows."""
JSON = re.compile(r'\s*(\{\s*(["}]|$)|\[\s*(\{|$|[-\d\s,]*\]\s*$|".*"\s*\]\s*$))')
"""Matches the start of a file that is JSON or meant to be; plain prompts may begin with a bracket too."""


GZIP = b"\x1f\x8b"
"""How a file of gzip begins (RFC 1952)."""
XZ = b"\xfd7zXZ\0"
"""How one of xz begins (its format, section 2.1.1.1)."""
LARGEST = 1 << 30
"""The most bytes that are unpacked of it."""
MOST_LINES = 1 << 23
"""The most lines, and turns of all sessions: Python takes hundreds of bytes for a request of two, of which a small xz may have hundreds of millions."""
HEADS = 1 << 21
"""The most blocks of different tools and system prompts."""
UNKNOWN = 0
"""The block of a trace's requests, until all lines are read."""


class Prompt(msgspec.Struct):
    """A request.

    Attributes:
        blocks: Keys of its full blocks. Two prompts share a prefix as far as their keys are equal.
        block: Tokens in a block.
        tokens: Tokens in the whole prompt.
        output: Tokens that the request generates.
        session: Of an agent's session: its number. Its turns never run at once, and only what it may share with other sessions is in `blocks`.
        kept: Tokens that an earlier turn of it has.
    """

    blocks: list[int]
    block: int
    tokens: int
    output: int
    session: int | None = None
    kept: int = 0


class BlockSize:
    """How many tokens a hash id of a trace stands for: traces do not say it, but each line's lengths do about."""

    def __init__(self) -> None:
        self._possible = TRACE_BLOCKS

    def narrow(self, ids: int, tokens: int) -> None:
        """Look at a line.

        Args:
            ids: It has so many; the block at its end may be missing. Without any it says nothing.
            tokens: In its prompt.

        Raises:
            EstimateError: There is no size that fits this line and all before it.
        """
        left = tuple(size for size in self._possible if not ids or tokens // size <= ids <= -(-tokens // size))
        if not left:
            sizes = TRACE_BLOCK if self._possible == TRACE_BLOCKS else " or ".join(map(str, self._possible))
            raise EstimateError(
                f"{ids:,} hash_ids for {tokens:,} tokens: they are no blocks of {sizes} tokens"
                + (", nor of another power of two" if sizes == TRACE_BLOCK else ", as in the lines before")
            )
        self._possible = left

    @property
    def tokens(self) -> int:
        """The likeliest size that fits all lines."""
        return self._possible[0]


class Sessions:
    """The agents' sessions of a file."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}
        self._heads: dict[tuple[int, int, int], list[int]] = {}
        self._blocks = self._all = 0

    def read(self, row: Any) -> Session:
        """
        Raises:
            EstimateError: The row is no session, or none that fits those before; or they have too many turns.
        """
        found = session_of(row, self.turns)
        self._all += len(found.turns)
        if self._all > MOST_LINES:
            raise EstimateError(f"more than {MOST_LINES:,} turns, with those of the lines before")
        self.turns[found.session] = len(found.turns)
        return found

    def prompts(self, session: Session) -> Iterator[Prompt]:
        """One for each turn.

        Raises:
            EstimateError: The file has too many tools.
        """
        heads: list[int] = []  # tokens of tools and system prompt in front of each turn
        for number, turn in enumerate(session.turns):
            kept = session.kept(number)
            heads.append(kept if turn.like is None else min(kept, heads[turn.like]))
            blocks = self._head(session.tool_tokens, session.system_tokens, heads[-1] // KEPT_BLOCK)
            yield Prompt(blocks, KEPT_BLOCK, turn.tokens, turn.out, session.session, kept if number else 0)

    def _head(self, tools: int, system: int, count: int) -> list[int]:
        """The first blocks, of which sessions with equal tools share those that are nothing but tools."""
        key = (tools, system, count)
        if key not in self._heads:
            self._blocks += count
            if self._blocks > HEADS:
                raise EstimateError(f"more than {HEADS * KEPT_BLOCK:,} tokens of different tools and system prompts")
            alike = min(count, tools // KEPT_BLOCK)
            self._heads[key] = [hash((tools, i) if i < alike else (tools, system, i)) for i in range(count)]
        return self._heads[key]


class HashedRequest(msgspec.Struct):
    """A line of a trace in Mooncake's form."""

    input_length: Tokens
    hash_ids: list[int]
    output_length: Tokens | None = None


class Part(msgspec.Struct):
    """A piece of a message; images have no text."""

    text: str | None = None
    thinking: str | None = None


class Message(msgspec.Struct):
    """A message of a chat: what chat templates make text of."""

    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    tools: Any = None


class Sampling(msgspec.Struct):
    """SGLang's own parameters."""

    max_new_tokens: Tokens | None = None


Token = Annotated[int, Meta(ge=0)]
Prompts = str | list[Token | str | list[Token]]
"""A text, its tokens, or several of either."""


Form = TypeVar("Form", bound=msgspec.Struct)


class Request(msgspec.Struct):
    """What a client of OpenAI's API or of SGLang's own sends: the fields that matter here."""

    input_ids: Prompts | None = None
    prompt: Prompts | None = None
    text: Prompts | None = None
    messages: list[Message] | None = None
    tools: Any = ""
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    sampling_params: Sampling | list[Sampling] | None = None


class Workload(msgspec.Struct):
    """What a file has, what it was taken for, and what in it is hardly meant so."""

    prompts: list[Prompt]
    source: str
    warnings: list[str]


def load(path: Path, output: int) -> Workload:
    """Requests of an OpenAI batch file, SGLang's request log (--log-requests-format json --log-requests-level 3), a
    Mooncake trace, sessions of coding agents (agentic.py), or a text file with a prompt on each line. The first line decides which; log lines may be
    mixed with other output.

    Args:
        output: How many tokens a request generates if the file does not say.

    Raises:
        EstimateError: The file cannot be read, a line (named in the message) is no request, or there are no requests.
    """
    lines = list(lines_of(path))
    logged = [(number, line[found.end() :]) for number, line in lines if (found := LOGGED.match(line))]
    if not logged and any(LOGGED_AS_TEXT.match(line) for _, line in lines):
        raise EstimateError(f"{path} is a log in text: SGLang writes JSON with --log-requests-format json")
    if not logged and lines and JSON.match(lines[0][1]) and lines[0][1].lstrip().startswith("["):
        shape = "an array over several lines" if lines[1:] else "an array"
        raise EstimateError(f"{path} is {shape}: write one request a line (JSONL)")
    prompts: list[Prompt] = []
    size, sessions, is_json = BlockSize(), Sessions(), bool(logged or (lines and JSON.match(lines[0][1])))
    for number, line in logged or lines:
        try:
            prompts += _of_row(line, output, size, sessions) if is_json else [_of_text(line, output)]
        except (EstimateError, RecursionError) as error:
            raise EstimateError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise EstimateError(f"{path} has no request: give an OpenAI batch, a request log, a trace, or prompts")
    for prompt in prompts:
        if prompt.block == UNKNOWN:
            prompt.block = size.tokens
            prompt.blocks = prompt.blocks[: prompt.tokens // size.tokens]
    kind = _kind(lines[0][1], bool(logged), size, len(sessions.turns)) if is_json else _plain(path, lines)
    requests = f"{len(prompts):,} {'request' if is_json else 'prompt'}{'' if len(prompts) == 1 else 's'}"
    like_json = [number for number, line in lines[1:] if not is_json and JSON.match(line) and line.lstrip()[0] == "{"]
    warnings = [
        f"line {number} begins like JSON, but the first line is plain text, and so each line is taken for a prompt"
        for number in like_json[:1]
    ]
    return Workload(prompts, f"{requests}, {kind}, from {path.name}", warnings)


def _kind(first: str, logged: bool, size: BlockSize, sessions: int) -> str:
    """What JSON was taken for, by its first line."""
    row = {} if logged else jsonl.loads(first)
    if logged or "event" in row:
        return "a request log of SGLang"
    if "turns" in row:
        return f"{sessions:,} session{'' if sessions == 1 else 's'} of coding agents"
    if "hash_ids" in row:
        return f"a trace with blocks of {size.tokens} tokens"
    return "an OpenAI batch" if "body" in row else "JSON, one object a line"


def _plain(path: Path, lines: list[tuple[int, str]]) -> str:
    """What text was taken for: neither CSV nor quoted strings are parsed."""
    quoted = path.suffix.lower() in (".csv", ".tsv") or all(line.lstrip().startswith('"') for _, line in lines)
    return "plain text, one a line" + ", with quotes and commas as a part of it" * quoted


def _raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked if it is xz."""
    with path.open("rb") as file:
        if not file.peek(len(XZ)).startswith(XZ):
            yield from iter(lambda: file.readline(LONGEST + 1), b"")
            return
        try:
            import lzma  # which some builds of Python lack
        except ImportError:
            raise EstimateError(f"{path} is xz, and this Python cannot unpack it: run xz -dk on it first") from None
        try:
            with lzma.open(file) as unpacked:
                for line in iter(lambda: unpacked.readline(LONGEST + 1), b""):
                    if unpacked.tell() > LARGEST:
                        raise EstimateError(f"{path} has more than {LARGEST >> 30} GiB when it is unpacked")
                    yield line
        except (lzma.LZMAError, EOFError, MemoryError):
            raise EstimateError(f"{path} is xz, but damaged: it cannot be unpacked") from None


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their line numbers.

    Raises:
        EstimateError: The file cannot be read, or is no text.
    """
    try:
        for number, line in enumerate(_raw_lines(path), 1):
            if number > MOST_LINES:
                raise EstimateError(f"{path} has more than {MOST_LINES:,} lines")
            if len(line) > LONGEST:
                raise EstimateError(f"{path}, line {number}: more than {LONGEST >> 20} MiB")
            if number == 1 and line.startswith(GZIP):
                raise EstimateError(f"{path} is gzip: unpack it first")
            if number == 1 and jsonl.is_utf_16(line):
                raise EstimateError(f"{path} {jsonl.UTF_16}")
            text = jsonl.unmarked(line).decode().rstrip("\r\n")
            if "\0" in text:
                raise EstimateError(f"{path}, line {number}: not text, but zero bytes")
            if text.strip():
                yield number, text
    except OSError as error:
        raise EstimateError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EstimateError(f"{path}, line {number}: not UTF-8") from None


def object_in(line: str) -> dict[str, Any]:
    """A line's JSON object.

    Raises:
        EstimateError: It has none.
        RecursionError: It is nested too deeply.
    """
    try:
        row = jsonl.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise EstimateError(f"not a whole JSON object{jsonl.joined(line.encode(errors='surrogatepass'))}")
    return row


def _of_row(line: str, output: int, size: BlockSize, sessions: Sessions) -> list[Prompt]:
    """The requests in a line of JSON: one, several, or none if it is another event of a log. Those of a trace narrow the size of its blocks."""
    row = object_in(line)
    if "turns" in row:
        return list(sessions.prompts(sessions.read(row)))
    if "hash_ids" in row:
        hashed = _converted(row, HashedRequest)
        size.narrow(len(hashed.hash_ids), hashed.input_length)
        return [Prompt(hashed.hash_ids, UNKNOWN, hashed.input_length, first_given(hashed.output_length, output))]
    logged = "event" in row
    if logged and row["event"] != "request.received":
        return []
    within = "obj" if logged else "body" if "body" in row else ""
    request = _converted(row.get(within) if within else row, Request, within)
    given = _given(request)
    if given is None:
        raise EstimateError(f"no prompt; {WHOLE}" if logged else _without_prompt(row, within))
    prompts = _prompts(given)
    if not prompts:
        raise EstimateError("a prompt must be a text, or tokens and nothing else" + f"; {WHOLE}" * logged)
    if logged and any(_is_cut(prompt) for prompt in prompts):
        raise EstimateError(f"a part of a prompt; {WHOLE}")
    sampling = request.sampling_params
    samplings = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(prompts)
    if len(samplings) != len(prompts):
        raise EstimateError(f"{len(prompts)} prompts and {len(samplings)} sampling_params")
    limit = first_given(request.max_completion_tokens, request.max_tokens, output)
    limits = [first_given(its.max_new_tokens, limit) for its in samplings]
    return [
        _of_text(prompt, most) if isinstance(prompt, str) else _of_tokens(prompt, most)
        for prompt, most in zip(prompts, limits, strict=True)
    ]


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def _converted(row: Any, form: type[Form], within: str = "") -> Form:
    """A row of JSON, or what it has under a key, in a form."""
    try:
        return msgspec.convert(row, form)
    except msgspec.ValidationError as error:
        raise EstimateError(fault(error, within or "it", f"{within}." * bool(within))) from None


def _given(request: Request) -> Prompts | None:
    given: Prompts | None = first_given(request.input_ids, request.prompt, request.text)
    if given is None and request.messages:
        given = _chat(request.messages, request.tools)
    return given


def _without_prompt(row: dict[str, Any], within: str) -> str:
    """What there is in place of a prompt."""
    inner = row[within] if within else row
    if empty := [key for key in KNOWN if key in inner]:
        return f"its {' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty, and there is no other prompt"
    keys = [key for key in row if key != within] + [f"{within}.{key}" for key in inner if within]
    more = f" and {len(keys) - LISTED:,} more" if len(keys) > LISTED else ""
    found = f"the keys {', '.join(key[:LONGEST_KEY] for key in keys[:LISTED])}{more}" if keys else "no keys"
    return f"it has {found}; known are {', '.join(KNOWN)} (docs/estimate.md)"


def _prompts(given: Prompts) -> list[str | list[int]]:
    """The prompts: texts, or lists of tokens; none if tokens and texts are mixed."""
    if isinstance(given, str):
        return [given]
    tokens = [piece for piece in given if isinstance(piece, int)]
    others = [piece for piece in given if not isinstance(piece, int)]
    if bool(tokens) == bool(others):
        return []
    return [tokens] if tokens else others


def _chat(messages: list[Message], tools: Any) -> str:
    parts = [json.dumps(tools)]
    for message in messages:
        content = message.content or ""
        if not isinstance(content, str):
            content = "".join(part.text or part.thinking or "" for part in content)
        more = "".join(json.dumps(one) for one in (message.tool_calls, message.tools) if one)
        parts.append(f"{message.role}: {message.reasoning_content or ''}{content}{more}")
    return "\n".join(parts)


def _is_cut(prompt: str | list[int]) -> bool:
    return len(prompt) == LOGGED_PART + 3 and prompt[LOGGED_PART // 2 :][:3] == "..."


def _of_tokens(tokens: list[int], output: int) -> Prompt:
    keys = [hash(tuple(tokens[i : i + BLOCK])) for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return Prompt(keys, BLOCK, len(tokens), output)


def _of_text(text: str, output: int) -> Prompt:
    size = BLOCK * CHARS_PER_TOKEN
    # JSON may have halves of a character.
    pieces = (text[i : i + size].encode(errors="surrogatepass") for i in range(0, len(text) - size + 1, size))
    return Prompt([zlib.crc32(piece) for piece in pieces], BLOCK, max(1, len(text) // CHARS_PER_TOKEN), output)


def batch_of(prompts: list[Prompt]) -> Batch:
    """A batch of these requests, each half way through its answer."""
    roots: list[Node] = []
    stack = [(list(range(len(prompts))), 0, roots)]
    while stack:
        queries, index, siblings = stack.pop()
        groups = defaultdict(list)
        for query in queries:
            if index < len(prompts[query].blocks):
                groups[prompts[query].block, prompts[query].blocks[index]].append(query)
        for (block, _), group in groups.items():
            if len(group) < 2:
                continue
            first, end = prompts[group[0]].blocks, index + 1
            while all(prompts[query].blocks[end : end + 1] == first[end : end + 1] != [] for query in group):
                end += 1
            node = Node(index * block, end * block, group)
            siblings.append(node)
            stack.append((group, end, node.children))
    return Batch([p.tokens + max(1, p.output // 2) for p in prompts], roots)
