"""Grammars of libraries that import torch, behind ``core.grammar``."""
