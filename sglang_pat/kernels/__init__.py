"""Runs plans: the native modules for CPUs and GPUs, and a plain PyTorch reference."""
