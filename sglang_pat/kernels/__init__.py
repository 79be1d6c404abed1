"""Runs plans: the native modules for CPUs and GPUs."""
