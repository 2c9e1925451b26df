"""The pool keeps whatever parts a layer's cache has."""

from __future__ import annotations

from dataclasses import replace

import torch

from setpoint.core.cachegroups import cache_layout
from setpoint.core.model import CachePart
from setpoint.engine.runner.kv_pool import KVPool
from setpoint_testing.specs import tiny_spec


def test_parts_of_any_shape_lie_apart_and_fill_the_pool() -> None:
    parts = (CachePart("latent", 1, 24), CachePart("index", 2, 8))
    layout = replace(cache_layout(tiny_spec(num_layers=3), 64), parts=parts)
    pool = KVPool(layout, num_pages=5, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.num_bytes == 6 * layout.page_bytes(4, 4) == 6 * 4 * 3 * (24 + 16) * 4
    assert len(pool.layers) == 3
    for number, layer in enumerate(pool.layers):
        assert [tuple(part.shape) for part in layer] == [(6, 4, 1, 24), (6, 4, 2, 8)]
        for index, part in enumerate(layer):
            assert part.is_contiguous()
            part.fill_(10 * number + index)
    for number, layer in enumerate(pool.layers):
        assert [part.unique().tolist() for part in layer] == [[10 * number], [10 * number + 1]]
