"""Addresses of servers and their API keys, as users give them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from sglang_pat.config import KEY

KEY_PROBLEM = f"an API key has printable ASCII characters only: give another one with --api-key or in {KEY}"


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


def completed(url: str) -> str:
    """An address as a user may write it, with `http://` in front of a mere host and port."""
    return f"http://{url}" if re.fullmatch(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}(/\S*)?", url) else url


def is_in_the_clear(url: str) -> bool:
    """Whether others on the way can read what is sent to this address, as of `is_address`."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        return parts.scheme == "http" and not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return parts.scheme == "http" and host != "localhost"


def is_key(key: str) -> bool:
    """Whether a request can carry this API key."""
    return key.isascii() and key.isprintable()
