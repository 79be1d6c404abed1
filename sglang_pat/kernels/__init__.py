"""Executors of a plan: one Python wrapper per native module, and a plain PyTorch reference."""
