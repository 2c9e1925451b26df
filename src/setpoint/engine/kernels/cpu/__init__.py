"""Kernels for CPUs in C++: compiled on this machine (``build``), bound with ctypes (``library``),
behind ``Ops`` (``ops``).

This file stays empty so that ``python -m setpoint.engine.kernels.cpu.build`` does not import torch.
"""
