"""Triton kernels for attention programs: sources, their rendering, tile configurations and selection."""
