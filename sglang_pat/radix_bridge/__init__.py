"""Follows SGLang's prefix cache: turns what happens in its tree into events, and mirrors the paths of running requests."""

from sglang_pat.radix_bridge.observer import Observer
