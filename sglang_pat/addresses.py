"""Addresses and API keys of servers, as users give them to commands."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

KEY_PROBLEM = "an API key has printable ASCII characters only: give another one with --api-key or in OPENAI_API_KEY"


def is_address(url: str, paths: Collection[str] | None = None) -> bool:
    """Whether this is an address of a server, without user, query and fragment. An error must not repeat one that is not: it may contain a
    password.

    Args:
        url: What a user gave.
        paths: Which paths it may have, without the slash at the end; any if None.
    """
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        return False
    known = paths is None or parts.path.rstrip("/") in paths
    return whole and known and url.isprintable() and not set("@?# ") & set(url)


def is_key(key: str) -> bool:
    """Whether a request can carry this API key."""
    return key.isascii() and key.isprintable()
