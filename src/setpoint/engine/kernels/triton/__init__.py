"""Kernels in Triton, for GPUs. Only this package imports Triton, and only where it can run."""
