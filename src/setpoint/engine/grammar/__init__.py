"""Adapters (``core.grammar``) of grammar libraries that import torch."""
