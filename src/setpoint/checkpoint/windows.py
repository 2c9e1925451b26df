"""How far each layer of a model sees: what the families' configs say about sliding windows.

Each function reads a config of so many layers and returns per layer the positions that a token sees
there, its own included (None: all before it), or () if no layer has a window.
"""

from __future__ import annotations

from collections.abc import Callable

from setpoint.checkpoint.configfile import LONGEST, ConfigFile, shown

Windows = tuple[int | None, ...]
SLIDING, FULL = "sliding_attention", "full_attention"
"""What ``layer_types`` calls layers with and without a window."""


def none(config: ConfigFile, num_layers: int) -> Windows:
    return ()


def every_layer(config: ConfigFile, num_layers: int) -> Windows:
    """All of them, or none (``sliding_window`` null, as Mistral has it from version 0.2 on)."""
    window = _window(config)
    return () if window is None else (window,) * num_layers


def gemma2(config: ConfigFile, num_layers: int) -> Windows:
    return _must_have(config, _by_layer(config, num_layers, lambda layer: layer % 2 == 0))


def gemma3(config: ConfigFile, num_layers: int) -> Windows:
    period = config.positive("sliding_window_pattern", 6)
    return _must_have(config, _by_layer(config, num_layers, lambda layer: (layer + 1) % period > 0))


def qwen(config: ConfigFile, num_layers: int) -> Windows:
    """Most configs carry a window and say that it is not used."""
    first = config.config.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        config.fail("max_window_layers", f"must be an integer of at least 0, not {shown(first)}")
    found = _by_layer(config, num_layers, lambda layer: layer >= first)
    return found if config.flag("use_sliding_window") else ()


def _window(config: ConfigFile) -> int | None:
    if config.config.get("sliding_window") is None:
        return None
    return config.positive("sliding_window", at_most=LONGEST)


def _by_layer(config: ConfigFile, num_layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    """sliding_window on the layers that layer_types or else ``is_sliding`` picks."""
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
            f"must name {num_layers} layers, each {SLIDING} or {FULL}, not {shown(kinds)}",
        )
    if window is None or SLIDING not in kinds:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _must_have(config: ConfigFile, found: Windows) -> Windows:
    if config.config.get("sliding_window") is None:
        config.fail("sliding_window", "is missing; local layers need one")
    return found
