"""Follows SGLang's prefix cache: events from its own tree, and a mirror of the paths that running requests use."""

from sglang_pat.radix_bridge.observer import Observer

__all__ = ["Observer"]
