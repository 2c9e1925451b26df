"""How far layers see, which groups that makes, and what sequences then cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.checkpoint.spec import read_spec
from setpoint.core.cachegroups import PADDING, cache_layout
from setpoint.core.pagerows import CacheCosts, PageRow, WindowColumns
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.specs import tiny_spec

CONFIGS = {golden.name: golden.config for golden in GOLDENS}
GEMMA3 = CONFIGS["gemma3_text: two local to one global"]
QWEN3 = CONFIGS["qwen3: tied"]
FULL, SLIDING = "full_attention", "sliding_attention"


def gemma3_windows(num_layers: int, window: int) -> tuple[int | None, ...]:
    return tuple(window if (layer + 1) % 6 else None for layer in range(num_layers))


def windows_of(folder: Path, config: dict[str, Any], **changes: Any) -> tuple[int | None, ...]:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_spec(folder).windows


def test_windows_stand_on_the_layers_the_config_picks(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "sliding_window": 5, "use_sliding_window": True}
    assert windows_of(tmp_path, QWEN3, **sizes, max_window_layers=1) == (None, 5, 5)
    kinds = [SLIDING, FULL, SLIDING]
    assert windows_of(tmp_path, QWEN3, **sizes, layer_types=kinds) == (5, None, 5)
    assert windows_of(tmp_path, QWEN3, **sizes, layer_types=[FULL] * 3) == ()
    for unused in ({"use_sliding_window": False}, {"sliding_window": None}):
        assert windows_of(tmp_path, QWEN3, **(sizes | unused), layer_types=kinds) == ()
    assert windows_of(tmp_path, CONFIGS["mistral: 0.1: a window"], num_hidden_layers=3) == (16,) * 3
    assert windows_of(tmp_path, CONFIGS["llama: two queries per key"]) == ()


def test_a_model_of_one_kind_is_one_group_of_all_layers() -> None:
    (group,) = cache_layout(tiny_spec(num_layers=5), 4096).groups
    assert (group.layers, group.window) == ((0, 1, 2, 3, 4), None)
    (group,) = cache_layout(tiny_spec(windows=(64, 64)), 65).groups
    assert (group.layers, group.window) == ((0, 1), 64)
    (group,) = cache_layout(tiny_spec(windows=(64, 64)), 64).groups
    assert group.window is None


@pytest.mark.parametrize(
    ("num_layers", "window", "num_slabs", "groups"),
    [(26, 512, 4, (1, 6)), (34, 1024, 5, (1, 6)), (48, 1024, 8, (1, 5)), (62, 1024, 5, (2, 11))],
)
def test_groups_of_the_gemma_3_models(
    num_layers: int, window: int, num_slabs: int, groups: tuple[int, int]
) -> None:
    spec = tiny_spec(num_layers=num_layers, windows=gemma3_windows(num_layers, window))
    layout = cache_layout(spec, 131_072)
    row = layout.page_row
    assert (layout.num_slabs, row.num_full, row.width - row.num_full) == (num_slabs, *groups)
    assert row.windows == (WindowColumns(window, row.num_full, row.width),)
    assert layout.page_bytes(16, 2) == num_slabs * 16 * 2 * 2 * 16 * 2
    assert layout.places()[5] == (0, 0)
    assert layout.places()[0] == (row.num_full, 0)


@given(
    st.lists(st.sampled_from([None, 4, 64]), min_size=1, max_size=40), st.sampled_from([32, 500])
)
def test_every_layer_has_one_place_and_little_is_wasted(
    windows: list[int | None], context_len: int
) -> None:
    layout = cache_layout(tiny_spec(num_layers=len(windows), windows=tuple(windows)), context_len)
    places = layout.places()
    assert sorted(places) == list(range(len(windows)))
    assert len(set(places.values())) == len(windows)
    for layer, (index, slab) in places.items():
        window = windows[layer]
        seen = window if window is not None and window < context_len else None
        assert (layout.groups[index].window, slab < layout.num_slabs) == (seen, True)
    assert len(layout.groups) * layout.num_slabs <= PADDING * len(windows)


COSTS = st.builds(
    lambda num_full, windows, read_step, page_size, span: CacheCosts(
        PageRow(
            num_full,
            tuple(
                WindowColumns(window, num_full + index, num_full + index + 1)
                for index, window in enumerate(windows)
            ),
            read_step,
        ),
        page_size,
        span,
    ),
    st.integers(0, 2),
    st.lists(st.integers(1, 20), min_size=1, max_size=2, unique=True).map(sorted),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 30),
)


@given(COSTS, st.integers(1, 300), st.integers(0, 300))
def test_the_costs_bound_a_sequence_that_slides(
    costs: CacheCosts, num_tokens: int, num_prompt: int
) -> None:
    """A sequence is walked from chunk to chunk, then token by token, with its pages counted."""
    row, page, held = costs.row, costs.page_size, 0
    first, covered, start = [0] * len(row.windows), 0, 0

    def pages_held() -> int:
        count = row.num_full * covered
        return count + sum(
            columns.num_groups * (covered - begin)
            for columns, begin in zip(row.windows, first, strict=True)
        )

    while start < num_tokens:
        chunk = min(costs.span, num_prompt - start) if start < num_prompt else 1
        end = min(start + chunk, num_tokens)
        before = pages_held()
        for index, columns in enumerate(row.windows):
            first[index] = row.first_needed(columns, start // page * page) // page
        covered = max(covered, -(-end // page))
        grown = (pages_held() - before) * page
        assert grown <= costs.growth(-(-(end - start) // page) * page + page, start)
        held = max(held, pages_held() * page)
        if start >= num_prompt:
            assert pages_held() * page <= costs.decoding(end)
        start = end
    assert held <= costs.most(num_tokens)
    assert costs.longest(costs.most(num_tokens) + 1) >= num_tokens
    assert costs.most(costs.longest(1000)) <= 1000


def test_with_one_group_every_cost_is_the_number_of_tokens() -> None:
    costs = CacheCosts(page_size=4, span=100)
    assert (costs.most(9), costs.decoding(9), costs.growth(2.5, 7)) == (12, 12, 2.5)
    assert costs.longest(400) == costs.capacity(400, 1000) == costs.capacity(400, 10) == 400


def test_capacity_is_what_fits_beside_one_chunk_and_meets_the_longest_where_one_does() -> None:
    row = PageRow(1, (WindowColumns(100, 1, 6),), read_step=1)
    costs = CacheCosts(row, page_size=1, span=50)
    alone = costs.most(1000) + 1
    assert costs.capacity(alone, 1000) == 1000
    assert costs.capacity(alone - 1, 1000) == costs.longest(alone - 1) < 1000
    for num_tokens in (700, 1000, 1234, 50_000):
        assert 0 <= costs.capacity(costs.pool_for(num_tokens, 1000), 1000) - num_tokens <= 6
    assert costs.capacity(alone + 3 * costs.decoding(1000), 1000) == 4000
