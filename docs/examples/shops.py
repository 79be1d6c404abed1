"""Writes prompts.jsonl: 64 questions behind 4 system prompts of about 4,000 tokens, an OpenAI batch."""

import json
from pathlib import Path

RULES = "Answer in one sentence, name the shelf, and never promise a delivery date. "


def line(shop: str, number: int) -> str:
    system = f"You are the assistant of a shop that sells {shop}. " + RULES * 210
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Is item {number} there?"}]
    body = {"messages": messages, "max_tokens": 256}
    return json.dumps({"custom_id": f"{shop}-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


shops = ("books", "maps", "music", "games")
Path("prompts.jsonl").write_text("".join(f"{line(shop, number)}\n" for shop in shops for number in range(16)))
