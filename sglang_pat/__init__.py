"""Prefix-aware decode attention (PAT) for SGLang."""
