"""What the chaos asks: a small forest of nested prefixes, and questions whose answers do not depend on what runs beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

Ids = tuple[int, ...]

VOCABULARY = range(10, 250)
"""Token ids of prompts: bytes in the tiny model, ordinary tokens in others, and never one that begins a text."""

LONGEST = 128
"""Tokens that a question asks for at most."""

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Question:
    """A request without what is chosen anew each time: its id, whether it streams, its namespace, its priority.

    Attributes:
        kind: What its answer is compared with.
        path: Where it goes.
        text: Its body, as JSON.
    """

    kind: str
    path: str
    text: str

    @staticmethod
    def make(kind: str, path: str, body: dict[str, Any]) -> Question:
        return Question(kind, path, json.dumps(body, sort_keys=True))

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.text)


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    """Greedy `sampling_params`."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}


def greedy(prompt: Sequence[int], tokens: int = LONGEST, lora: str | None = None) -> Question:
    body = {"input_ids": list(prompt), "sampling_params": sampling(tokens)}
    return Question.make("greedy", GENERATE, body | ({"lora_path": lora} if lora else {}))


class Forest:
    """Prompts that are random walks in a fixed tree of prefixes, so that every kind of split happens."""

    def __init__(self, seed: int, branch: int) -> None:
        """A prefix has up to `branch` tokens more than the one above it."""
        self._random = random.Random(f"forest {seed}")
        self._seed, self._longest = seed, branch

    def _branch(self, state: int) -> Ids:
        branch = random.Random(f"{self._seed} branch {state}")
        return tuple(branch.choice(VOCABULARY) for _ in range(branch.randint(5, self._longest)))

    def own(self, least: int, most: int) -> Ids:
        """Tokens that no other prompt has."""
        return tuple(self._random.choice(VOCABULARY) for _ in range(self._random.randint(least, most)))

    def prompt(self, depth: int = 5) -> Ids:
        tokens: Ids = ()
        state = self._random.randrange(3)
        for _ in range(self._random.randint(1, depth)):
            tokens += self._branch(state)
            state = state * 3 + self._random.randrange(3)
        if self._random.random() < 0.3:
            tokens = tokens[: self._random.randint(1, len(tokens))]
        if self._random.random() < 0.5:
            tokens += self.own(1, 20)
        return tokens

    def of_length(self, length: int) -> Ids:
        """A prompt of `length` tokens, whose beginning others share."""
        tokens = self.prompt(3)
        while len(tokens) < length:
            tokens += self.own(40, 60)
        return tokens[:length]

    def prose(self, length: int) -> str:
        """Lower-case letters and blanks; texts share beginnings too."""
        begin = "the quick brown fox jumps over the lazy dog and then " * self._random.randint(0, 2)
        return begin + "".join(self._random.choice("abcdefghij klmno ") for _ in range(length))


@dataclass
class Script:
    """A conversation: what is said in each turn, and how many tokens are answered.

    Attributes:
        begin: Shared with other prompts.
    """

    begin: Ids
    turns: list[Ids]
    tokens: list[int]


@dataclass
class Catalogue:
    """Everything that one chaos may ask; finite, so that answers can be learnt before it begins.

    Attributes:
        prompts: Of ordinary requests.
        huge: Chunked, the longest almost as long as the context.
        questions: By kind.
        context: Tokens of prompt and answer together.
    """

    context: int

    prompts: list[Ids]
    huge: list[Ids]
    questions: dict[str, list[Question]] = field(default_factory=dict)
    scripts: list[Script] = field(default_factory=list)
    loras: list[Question] = field(default_factory=list)

    def room(self, prompt: Ids) -> int:
        """Tokens that an answer may have."""
        return max(1, self.context - len(prompt))

    @staticmethod
    def write(
        seed: int, size: int, branch: int, context: int, longest: int, loras: Sequence[str], able: Collection[str], strings: bool
    ) -> Catalogue:  # fmt: skip
        """`size` ordinary prompts, and of everything else some.

        Args:
            branch: As of `Forest`.
            longest: Tokens of the longest prompt.
            loras: Names of adapters.
            able: As of `Chaos`: whether to ask for beam search, and to sample with seeds.
            strings: Whether to stop at strings too, not at tokens only.
        """
        forest, chance = Forest(seed, branch), random.Random(f"catalogue {seed}")
        few = max(4, size // 6)
        one_token = [forest.own(1, 1) for _ in range(few)]
        lengths = [longest, longest - 1, *(longest * (9 - i % 5) // 10 for i in range(few - 2))]
        catalogue = Catalogue(
            context,
            prompts=[forest.prompt() for _ in range(size)] + one_token,
            huge=[forest.of_length(length) for length in lengths],
            scripts=[
                Script(
                    forest.prompt(2),
                    [forest.own(1, 40) for _ in range(chance.randint(2, 5))],
                    [chance.choice([1, 4, 12, 30]) for _ in range(6)],
                )
                for _ in range(few)
            ],
            loras=[greedy(forest.prompt(3), lora=lora) for lora in loras for _ in range(few)],
        )
        catalogue.questions = {
            "stop": [_stop(forest.prompt(), chance, strings) for _ in range(few)],
            "logprobs": [_logprobs(forest.prompt(), chance) for _ in range(few)],
            "completion": [
                Question.make(
                    "completion",
                    COMPLETIONS,
                    {"model": "default", "prompt": forest.prompt(), "temperature": 0, "max_tokens": 20, "ignore_eos": True},
                )
                for _ in range(few)
            ],
            "chat": [
                Question.make(
                    "chat",
                    CHAT,
                    {
                        "model": "default",
                        "messages": [
                            {"role": "system", "content": "you are a helpful assistant " * chance.randint(1, 4)},
                            {"role": "user", "content": forest.prose(chance.randint(1, 80))},
                        ],
                        "temperature": 0, "max_tokens": 20, "ignore_eos": True,
                    },
                )
                for _ in range(few)
            ],
            "beam": [_beam(forest.prompt(), chance) for _ in range(few)] if "beams" in able else [],
            "seeded": [_seeded(forest.prompt(), chance) for _ in range(2 * few)] if "seeds" in able else [],
        }  # fmt: skip
        return catalogue


def _logprobs(prompt: Ids, chance: random.Random) -> Question:
    start = chance.choice([0, 0, len(prompt) // 2, max(0, len(prompt) - 1)])
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": start, "sampling_params": sampling(8)}
    return Question.make("logprobs", GENERATE, body)


def _seeded(prompt: Ids, chance: random.Random) -> Question:
    # All with a top_k: where one of a batch has any, or is greedy, SGLang draws from tokens by their rank, else by their id, so that a seed alone means
    # another token in such a batch (sampler.py, `top_k_top_p_min_p_sampling_from_probs_torch`).
    seed, temperature = chance.randrange(1 << 20), chance.choice([0.5, 0.8, 1.2])
    parameters = sampling(
        chance.choice([8, 40, 90]), temperature=temperature, top_k=chance.choice([5, 50, 200]), sampling_seed=seed
    )
    return Question.make(
        "seeded", GENERATE, {"input_ids": prompt, "return_logprob": True, "sampling_params": parameters}
    )


def _stop(prompt: Ids, chance: random.Random, strings: bool) -> Question:
    tokens = chance.sample(range(33, 95), 4)
    stop = (
        {"stop": chance.sample("aeinorst.{}", 3)} if strings and chance.random() < 0.5 else {"stop_token_ids": tokens}
    )
    return Question.make("stop", GENERATE, {"input_ids": prompt, "sampling_params": sampling(60, **stop)})


def _beam(prompt: Ids, chance: random.Random) -> Question:
    width = chance.randint(2, 4)
    parameters = sampling(chance.randint(2, 24), beam_width=width, n=chance.randint(1, width))
    return Question.make("beam", GENERATE, {"input_ids": prompt, "sampling_params": parameters})
