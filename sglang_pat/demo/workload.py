"""Requests as agents send them: system prompt, tools, question; and some that share nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORDS = (
    "agent answer budget cache check city code customer data day delay error file flight form graph hotel index "
    "item key limit list log map match model name note order page path plan price query rank report result room "
    "route rule score search sort source state step store table task team test ticket time token tool train tree "
    "user value view week word work"
).split()

HANDBOOK = (
    "You answer questions about a library from its handbook, in one sentence. Handbook: The library on Mill Street opens at nine in the morning "
    "and closes at six in the evening; on Sundays it is closed. A card is free for everybody who lives in the town, and lasts for two years. "
    "Books may be kept for four weeks, films for one week. Whoever brings a book back late pays ten cents for each day. At most twelve "
    "books may be lent at once. The reading room is on the second floor and has forty seats. Children under ten must come with an adult. "
    "The café on the ground floor sells coffee and cake, but food may not be taken into the reading room."
)
QUESTIONS = (
    "When does the library open?", "How long may I keep a book?", "What does a card cost?", "Where is the reading room?",
)  # fmt: skip
"""For models with trained weights."""


def prose(seed: str, length: int) -> str:
    """`length` characters of words, always the same for a seed."""
    generator = random.Random(seed)
    text = ""
    while len(text) < length:
        text += generator.choice(WORDS) + " "
    return text[:length]


def nested_prompts(systems: int, tools: int, questions: int, unrelated: int) -> list[str]:
    """Prompts that nest: each system prompt has `tools` tool descriptions, each of them `questions` questions.

    Questions differ in length, and the order is shuffled.
    """
    prompts = [
        prose(f"system {s}", 400 + 100 * s)
        + prose(f"tools {s} {t}", 150 + 50 * t)
        + prose(f"question {q} {s} {t}", 10 + 7 * q)
        for s in range(systems)
        for t in range(tools)
        for q in range(questions)
    ]
    prompts += [prose(f"unrelated {i}", 40 + 11 * i) for i in range(unrelated)]
    random.Random(0).shuffle(prompts)
    return prompts


def in_parallel(
    send: Callable[[str], str], prompts: Sequence[str], concurrency: int, done: Callable[[int], None] = lambda n: None
) -> list[str]:
    """The answer to each prompt, `concurrency` at a time."""
    answers = []
    with ThreadPoolExecutor(concurrency) as pool:
        for answer in pool.map(send, prompts):
            answers.append(answer)
            done(len(answers))
    return answers


def stream_completion(url: str, prompt: str, tokens: int) -> str:
    """One greedy completion through the OpenAI-compatible API, streamed."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        chunks = client.completions.create(
            model="default", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def chat(url: str, system: str, question: str, tokens: int) -> str:
    """One greedy answer, on one line."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        found = client.chat.completions.create(
            model="default", max_tokens=tokens, temperature=0,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        )  # fmt: skip
        return " ".join((found.choices[0].message.content or "").split())


def fork_program(url: str, topics: Sequence[str], branches: int, tokens: int) -> list[str]:
    """Run an SGLang frontend program that forks for each topic; its answers in order."""
    import sglang as sgl

    @sgl.function
    def advise(s: Any, topic: str) -> None:
        s += prose("advisor", 500) + topic
        forks = s.fork(branches)
        for i in range(branches):
            branch = forks[i]
            branch += f" option {i}: "
            branch += sgl.gen("answer", max_tokens=tokens, temperature=0)
        s["answers"] = [fork["answer"] for fork in forks]

    backend = sgl.RuntimeEndpoint(url)
    states = advise.run_batch([{"topic": topic} for topic in topics], backend=backend, num_threads=4)
    return [answer for state in states for answer in state["answers"]]
