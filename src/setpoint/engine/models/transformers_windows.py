"""Checks that the layers of a library model ask for the windows that its config declares. The trial
run cannot show it, because it is shorter than a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setpoint.core.model import ModelSpec
from setpoint.engine.attention.attention_backend import AttentionVariant


class WindowCheck:
    def __init__(self, config: Any, spec: ModelSpec) -> None:
        """config: the library's config object."""
        self._declared = spec.windows
        self._windowed = list(range(spec.num_layers))
        if types := getattr(config, "layer_types", None):
            self._windowed = [
                layer for layer, kind in enumerate(types) if kind == "sliding_attention"
            ]
        elif getattr(config, "sliding_window", None) is None or not getattr(
            config, "use_sliding_window", True
        ):
            self._windowed = []

    def contradiction(self, variants: Mapping[int, AttentionVariant]) -> str:
        """How the attention that the layers asked for contradicts the configs; empty if it does
        not."""
        if any(variants[layer].window is None for layer in self._windowed):
            return "its layers with a sliding window do not pass the window to their attention"
        asked = tuple(variants[layer].window for layer in sorted(variants))
        if self._declared and asked != self._declared:
            return f"its layers ask for the windows {asked}, not for {self._declared}"
        return ""
