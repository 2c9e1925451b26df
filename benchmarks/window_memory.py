"""How many tokens a KV pool holds where layers have windows, and how many if every layer kept every
position: a table from the memory plan.

    python benchmarks/window_memory.py [--gib 16] [--page-size 16] [--chunk 2048]

Nothing is measured: the plan is compared with the engine's memory in tests/golden, and what
sequences hold with the plan's costs in tests/unit. Sequences are as long as the context and decode,
beside one chunk of a prompt.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from machine import environment

from setpoint.core.cachegroups import cache_layout, layout_summary
from setpoint.core.pagerows import CacheCosts
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

CONTEXTS = (4096, 8192, 32_768, 131_072)
BF16 = 2


@dataclass(slots=True, frozen=True)
class Shape:
    """The properties of a model that determine the size of its KV cache."""

    name: str
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    def capacity(self, context_len: int, options: argparse.Namespace, *, freed: bool) -> int:
        """The number of tokens that the pool holds. freed: pages behind a window are given back."""
        spec = tiny_spec(
            num_layers=len(self.windows),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            windows=self.windows if freed else (),
        )
        layout = cache_layout(spec, context_len)
        costs = CacheCosts(layout.page_row, options.page_size, options.chunk)
        page = layout.page_bytes(options.page_size, BF16)
        num_pages = int(options.gib * GIB) // page - 1
        return costs.capacity(num_pages * options.page_size, context_len)

    def groups(self) -> str:
        spec = tiny_spec(num_layers=len(self.windows), windows=self.windows)
        return layout_summary(cache_layout(spec, CONTEXTS[-1]))


def one_in(period: int, num_layers: int, window: int) -> tuple[int | None, ...]:
    """The windows of layers of which every ``period``-th sees everything."""
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


SHAPES = (
    Shape("Gemma 3 1B", 1, 256, one_in(6, 26, 512)),
    Shape("Gemma 3 4B", 4, 256, one_in(6, 34, 1024)),
    Shape("Gemma 3 12B", 8, 256, one_in(6, 48, 1024)),
    Shape("Gemma 3 27B", 16, 128, one_in(6, 62, 1024)),
    Shape("Gemma 2 9B", 8, 256, one_in(2, 42, 4096)),
    Shape("Mistral 7B 0.1", 8, 128, (4096,) * 32),
    Shape("Llama 3.1 8B", 8, 128, (None,) * 32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16.0, help="size of the KV pool, in bf16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048)
    options = parser.parse_args()
    print(environment())
    print("model          | context | all positions | windows freed | times")
    for shape in SHAPES:
        for context_len in CONTEXTS:
            before, after = (
                shape.capacity(context_len, options, freed=freed) for freed in (False, True)
            )
            held = f"{before:13} | {after:13} | {after / before:.2f}"
            print(f"{shape.name:14} | {context_len:7} | {held}")
    for shape in SHAPES:
        print(f"{shape.name}: {shape.groups()}")


if __name__ == "__main__":
    main()
