"""The lines of a start."""

from __future__ import annotations

from setpoint.launch.child.loading import cache_sizes


def test_latent_attention_has_no_k_and_v() -> None:
    assert cache_sizes(1 << 30, is_latent=False) == "K size: 0.50 GB, V size: 0.50 GB"
    assert cache_sizes(1 << 30, is_latent=True) == "KV size: 1.00 GB"
