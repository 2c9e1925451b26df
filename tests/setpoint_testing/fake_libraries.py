"""Attention of libraries on the CPU: classes and functions with the recorded signatures of the
packages (``library_signatures``), which check what they are given and compute with torch in
float64.

They know of the packages what their documentation says: shapes, types, where a tensor has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from setpoint_testing.fake_graphs import recording
from setpoint_testing.library_signatures import recorded

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
CPU = torch.device("cpu")


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names, with the defaults. Raises TypeError for what the
    package's function does not take."""
    found = recorded(name).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


def check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype, tensor.dtype
    assert tensor.shape == shape, tensor.shape
    assert tensor.is_contiguous()


class FakeFlashInfer:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper."""

    made: Sequence[FakeFlashInfer] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(f"{WRAPPER}.__init__", self, *args, **kwargs)
        workspace = given["float_workspace_buffer"]
        check(workspace, torch.uint8, len(workspace))
        assert given["kv_layout"] == "NHD"
        assert given["backend"] == "fa2"
        assert not given["use_cuda_graph"]
        self.plans: list[dict[str, Any]] = []
        FakeFlashInfer.made = [*FakeFlashInfer.made, self]

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = bound(f"{WRAPPER}.plan", self, *args, **kwargs)
        rows, ends = given["qo_indptr"], given["paged_kv_indptr"]
        count = len(rows) - 1
        check(rows, torch.int32, count + 1)
        check(ends, torch.int32, count + 1)
        assert rows.device == ends.device == given["paged_kv_last_page_len"].device == CPU
        check(given["paged_kv_indices"], torch.int32, int(ends[-1]))
        check(given["paged_kv_last_page_len"], torch.int32, count)
        assert all(1 <= n <= given["page_size"] for n in given["paged_kv_last_page_len"].tolist())
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        assert given["head_dim_qk"] in (64, 128, 256)
        assert given["head_dim_vo"] in (None, given["head_dim_qk"])
        assert given["causal"]
        assert given["logits_soft_cap"] >= 0
        assert isinstance(given["window_left"], int)
        self.plans.append(given)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given, plan = bound(f"{WRAPPER}.run", self, *args, **kwargs), self.plans[-1]
        q, (k_cache, v_cache) = given["q"], given["paged_kv_cache"]
        size, heads = plan["head_dim_qk"], plan["num_kv_heads"]
        check(q, plan["q_data_type"], int(plan["qo_indptr"][-1]), plan["num_qo_heads"], size)
        for cache in (k_cache, v_cache):
            check(cache, plan["kv_data_type"], len(k_cache), plan["page_size"], heads, size)
        assert given["lse_base"] == ("ln" if given["return_lse"] else "log2")
        out, sums = torch.zeros_like(q), torch.zeros(q.shape[:2])
        bounds, ends = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for row, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            pages = plan["paged_kv_indices"][ends[row] : ends[row + 1]].long()
            own = slice(bounds[row], bounds[row + 1])
            length = (len(pages) - 1) * plan["page_size"] + last
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            scale = plan["sm_scale"] * given["k_scale"]
            window, cap = plan["window_left"], plan["logits_soft_cap"]
            found, sums[own] = attention(q[own], keys, values, scale, cap, window)
            out[own] = (found * given["v_scale"]).to(q.dtype)
        return (out, sums) if given["return_lse"] else out


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The function of sgl_kernel.flash_attn. It can be captured."""
    given = bound("flash_attn_with_kvcache", *args, **kwargs)
    q, k_cache, v_cache, out = (given[name] for name in ("q", "k_cache", "v_cache", "out"))
    count = len(given["cache_seqlens"])
    assert q.stride(-1) == q.stride(-2) // q.shape[-1] == 1
    check(k_cache, q.dtype, *k_cache.shape[:3], q.shape[-1])
    check(v_cache, q.dtype, *k_cache.shape)
    check(out, q.dtype, *q.shape)
    check(given["cache_seqlens"], torch.int32, count)
    check(given["page_table"], torch.int32, count, given["page_table"].shape[1])
    check(given["cu_seqlens_q"], torch.int32, count + 1)
    assert isinstance(given["max_seqlen_q"], int)
    assert given["causal"]
    left, right = given["window_size"]
    assert (left, right) == (-1, -1) or (left >= 0 == right)
    if given["sinks"] is not None:
        check(given["sinks"], torch.bfloat16, q.shape[1])
    recording(_flash)(given)
    return out


def _flash(given: dict[str, Any]) -> None:
    q, page_size = given["q"], given["k_cache"].shape[1]
    bounds = given["cu_seqlens_q"].tolist()
    for row, length in enumerate(given["cache_seqlens"].tolist()):
        own = slice(bounds[row], bounds[row + 1])
        assert own.stop - own.start <= given["max_seqlen_q"]
        if own.start == own.stop:
            continue
        pages = given["page_table"][row, : -(-length // page_size)].long()
        keys, values = (
            given[cache][pages].flatten(0, 1)[:length] for cache in ("k_cache", "v_cache")
        )
        scale, window = given["softmax_scale"], given["window_size"][0]
        found, sums = attention(q[own], keys, values, scale, given["softcap"], window)
        if given["sinks"] is not None:
            found *= torch.sigmoid(sums - given["sinks"].double()).unsqueeze(-1)
        given["out"][own] = found.to(q.dtype)


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, cap: float, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a row, q [c, H, D], whose last token is at the last of keys and values [kv, Hkv,
    D]; a token sees itself and ``left`` before it (-1: all). -> [c, H, D] and the logarithms of the
    sums that divide the weights, [c, H]."""
    share = q.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(share, 1) for each in (keys, values))
    scores = torch.einsum("chd,khd->chk", q.double(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)
    other = torch.arange(len(keys))
    seen = (other <= position) & ((left < 0) | (other >= position - left))
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    return torch.einsum("chk,khd->chd", scores.softmax(-1), values), scores.logsumexp(-1)
