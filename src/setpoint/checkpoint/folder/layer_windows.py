"""Reads the sliding windows of a model's layers from its config, by the rules of its family.

Each function takes a config and its number of layers. It returns, for each layer, the number of
positions that a token sees, including its own (None: all up to its own), or () if no layer has a
window.
"""

from __future__ import annotations

from collections.abc import Callable

from setpoint.checkpoint.folder.configfile import MAX_POSITIONS, ConfigFile, short_repr

Windows = tuple[int | None, ...]
SLIDING, FULL = "sliding_attention", "full_attention"
"""The names that ``layer_types`` uses for layers with and without a window."""


def none(config: ConfigFile, num_layers: int) -> Windows:
    return ()


def every_layer(config: ConfigFile, num_layers: int) -> Windows:
    """One window for all layers, or none if ``sliding_window`` is null (as in Mistral since version
    0.2)."""
    window = _window(config)
    return () if window is None else (window,) * num_layers


def alternating(config: ConfigFile, num_layers: int) -> Windows:
    """Every other layer, from the first on, unless ``layer_types`` names others."""
    return _must_have(config, _by_layer(config, num_layers, lambda layer: layer % 2 == 0))


def gemma3(config: ConfigFile, num_layers: int) -> Windows:
    period = config.positive("sliding_window_pattern", 6)
    return _must_have(config, _by_layer(config, num_layers, lambda layer: (layer + 1) % period > 0))


def qwen(config: ConfigFile, num_layers: int) -> Windows:
    """The layers from ``max_window_layers`` on, if ``use_sliding_window`` is true. Most configs of
    Qwen give a window and say that it is not used."""
    first = config.config.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        config.fail(
            "max_window_layers", f"must be an integer of at least 0, not {short_repr(first)}"
        )
    found = _by_layer(config, num_layers, lambda layer: layer >= first)
    return found if config.flag("use_sliding_window") else ()


def _window(config: ConfigFile) -> int | None:
    if config.config.get("sliding_window") is None:
        return None
    return config.positive("sliding_window", at_most=MAX_POSITIONS)


def _by_layer(config: ConfigFile, num_layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    """``sliding_window`` for the layers that ``layer_types`` names as sliding, or without
    ``layer_types`` those for which ``is_sliding`` is true; None for the others."""
    window, kinds = _window(config), config.config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if is_sliding(layer) else FULL for layer in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in (SLIDING, FULL) for kind in kinds)
    ):
        config.fail(
            "layer_types",
            f"must name {num_layers} layers, each {SLIDING} or {FULL}, not {short_repr(kinds)}",
        )
    if window is None or SLIDING not in kinds:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _must_have(config: ConfigFile, found: Windows) -> Windows:
    if config.config.get("sliding_window") is None:
        config.fail("sliding_window", "is missing; local layers need one")
    return found
