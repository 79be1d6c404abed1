"""Offline jobs: a file of requests whose prefixes are all known before it starts (BatchLLM, section 4)."""

from sglang_pat.batch.job import run
from sglang_pat.batch.lines import BatchError
