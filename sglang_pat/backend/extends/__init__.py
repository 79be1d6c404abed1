"""Extends: which requests of a batch run by plan, which on a stock backend, and how KV of few bits is read."""
