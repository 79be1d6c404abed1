"""What runs a plan: the native modules of CPUs and GPUs, and a plain PyTorch reference."""
