"""Implements ``kernels.ops.Ops`` with the C++ kernels: checks tensors and passes addresses.

Activations in bf16 or fp32; float64 is left to the reference.
"""

from __future__ import annotations

import ctypes

import torch

from setpoint.engine.kernels.cpu.calls import (
    BestCall,
    CombineCall,
    EmbeddingCall,
    GatedCall,
    LatentRopeCall,
    MaskCall,
    NormCall,
    PlaceCall,
    PlaceExpertsCall,
    RopeCall,
    RouteCall,
    SoftCapCall,
    TopCall,
)
from setpoint.engine.kernels.cpu.library import DTYPES, KV_DTYPES, Kernels, load
from setpoint.engine.kernels.ops import SCORINGS, KernelsUnavailable, Routing
from setpoint.engine.kernels.ref import log_sum_exp


class CpuOps:
    """Implements ``kernels.ops.Ops`` for tensors of one dtype."""

    sampling = None
    log_sum_exp = staticmethod(log_sum_exp)

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        self._dtype = dtype
        self._dtype_number = DTYPES[dtype]
        self._kernels = kernels
        self.level = kernels.level
        # A call for one token takes a few µs, so the argument structs are reused.
        self._place = PlaceCall()
        self._place_address = ctypes.addressof(self._place)
        self._best = BestCall()
        self._best_address = ctypes.addressof(self._best)
        self._top = TopCall()
        self._top_address = ctypes.addressof(self._top)
        self._mask = MaskCall()
        self._mask_address = ctypes.addressof(self._mask)
        self._embedding = EmbeddingCall(dtype=DTYPES[dtype])
        self._embedding_address = ctypes.addressof(self._embedding)
        self._norm = NormCall(dtype=DTYPES[dtype])
        self._norm_address = ctypes.addressof(self._norm)
        self._rope = RopeCall(dtype=DTYPES[dtype])
        self._rope_address = ctypes.addressof(self._rope)
        self._latent = LatentRopeCall(dtype=DTYPES[dtype])
        self._latent_address = ctypes.addressof(self._latent)
        self._route = RouteCall(dtype=DTYPES[dtype])
        self._route_address = ctypes.addressof(self._route)
        self._placing = PlaceExpertsCall()
        self._placing_address = ctypes.addressof(self._placing)
        self._combine = CombineCall(dtype=DTYPES[dtype])
        self._combine_address = ctypes.addressof(self._combine)
        self._gated = GatedCall(dtype=DTYPES[dtype])
        self._gated_address = ctypes.addressof(self._gated)
        self._capped = SoftCapCall()
        self._capped_address = ctypes.addressof(self._capped)

    def place_tokens(
        self,
        slots: torch.Tensor,
        cu_q: torch.Tensor,
        kv_lens: torch.Tensor,
        known: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = (slots, cu_q, kv_lens, known, page_table)
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in given)
        ids = torch.empty(num_tokens, dtype=torch.int32)
        positions, kv_index = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(2))
        call = self._place
        for name, tensor in zip(
            ("slots", "cu_q", "kv_lens", "known", "page_table"), given, strict=True
        ):
            setattr(call, name, tensor.data_ptr())
        call.ids = ids.data_ptr()
        call.positions = positions.data_ptr()
        call.kv_index = kv_index.data_ptr()
        call.rows = len(slots)
        call.known_stride = known.shape[1]
        call.table_stride = page_table.shape[1]
        call.page_size = page_size
        self._kernels.place_tokens(self._place_address)
        return ids, positions, kv_index

    def best_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.is_contiguous()
        out = torch.empty(len(logits), dtype=torch.int64)
        call = self._best
        call.logits = logits.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.cols = logits.shape
        call.dtype = DTYPES[logits.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.best_tokens(self._best_address)
        return out

    def top_tokens(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        assert logits.is_contiguous()
        assert count <= logits.shape[1]
        out = torch.empty((len(logits), count), dtype=torch.int64)
        call = self._top
        call.logits = logits.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.cols = logits.shape
        call.count = count
        call.dtype = DTYPES[logits.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.top_tokens(self._top_address)
        return out

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        assert logits.is_contiguous()
        assert rows.is_contiguous()
        assert rows.dtype == torch.int64
        assert words.is_contiguous()
        assert words.dtype == torch.int32
        call = self._mask
        call.logits, call.which, call.words = logits.data_ptr(), rows.data_ptr(), words.data_ptr()
        call.rows, call.cols, call.words_per_row = len(rows), logits.shape[1], words.shape[1]
        call.dtype = DTYPES[logits.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.mask_tokens(self._mask_address)

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        assert weight.dtype == self._dtype
        assert weight.is_contiguous()
        out = torch.empty((len(ids), weight.shape[1]), dtype=self._dtype)
        call = self._embedding
        call.ids = ids.data_ptr()
        call.weight = weight.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.cols = out.shape
        call.scale = scale
        call.threads = torch.get_num_threads()
        self._kernels.embedding(self._embedding_address)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self._dtype)
        self._normalise(x, None, weight, out, eps, offset)
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual.shape == x.shape
        assert residual.dtype == self._dtype
        assert residual.is_contiguous()
        assert x.is_contiguous()
        self._normalise(x, residual.data_ptr(), weight, x, eps, offset)
        return x, residual

    def _normalise(
        self,
        x: torch.Tensor,
        residual: int | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        offset: float,
    ) -> None:
        assert x.dtype == weight.dtype == self._dtype
        tokens, *heads, columns = x.shape
        stride, *inner = x.stride()
        group = heads[0] if heads else 1
        assert inner == ([columns, 1] if heads else [1])
        call = self._norm
        call.x = x.data_ptr()
        call.residual = residual
        call.weight = weight.data_ptr()
        call.out = out.data_ptr()
        call.rows = tokens * group
        call.cols = columns
        call.group = group
        call.stride = stride
        call.eps = eps
        call.offset = offset
        call.threads = torch.get_num_threads()
        self._kernels.rms_norm(self._norm_address)

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_index: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Rotates q in place and returns it; k stays unchanged."""
        call = self._rope
        call.rows, call.num_heads, head_dim = q.shape
        call.num_kv_heads = k.shape[1]
        call.head_dim = head_dim
        call.rotary_dim = cos_sin.shape[1]
        q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
        assert q.dtype == k.dtype == v.dtype == self._dtype
        assert q_stride[1:] == k_stride[1:] == v_stride[1:] == (head_dim, 1)
        assert cos_sin.dtype == torch.float32
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        call.q = q.data_ptr()
        call.k = k.data_ptr()
        call.v = v.data_ptr()
        call.cos_sin = cos_sin.data_ptr()
        call.positions = positions.data_ptr()
        call.k_cache = k_cache.data_ptr()
        call.v_cache = v_cache.data_ptr()
        call.kv_index = kv_index.data_ptr()
        call.q_stride = q_stride[0]
        call.k_stride = k_stride[0]
        call.v_stride = v_stride[0]
        call.k_scale, call.v_scale = k_scale, v_scale
        call.kv_dtype = KV_DTYPES[k_cache.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.rope_and_store(self._rope_address)
        return q

    def rope_and_store_latent(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        kv_index: torch.Tensor,
        scale: float = 1.0,
        *,
        interleaved: bool,
    ) -> torch.Tensor:
        given = (q_latent, q_rope, latent, k_rope)
        assert all(each.dtype == self._dtype and each.stride(-1) == 1 for each in given)
        assert all(each.is_contiguous() for each in (q_latent, latent, cache))
        assert cos_sin.dtype == torch.float32
        rows, heads, rank = q_latent.shape
        rope = k_rope.shape[1]
        q = torch.empty((rows, heads, rank + rope), dtype=self._dtype)
        call = self._latent
        call.q_latent, call.q_rope = q_latent.data_ptr(), q_rope.data_ptr()
        call.latent, call.k_rope = latent.data_ptr(), k_rope.data_ptr()
        call.q = q.data_ptr()
        call.cos_sin = cos_sin.data_ptr()
        call.positions = positions.data_ptr()
        call.cache = cache.data_ptr()
        call.kv_index = kv_index.data_ptr()
        call.rows, call.heads, call.rank, call.rope = rows, heads, rank, rope
        call.q_row, call.q_head = q_rope.stride(0), q_rope.stride(1)
        call.k_row = k_rope.stride(0)
        call.scale = scale
        call.interleaved = interleaved
        call.kv_dtype = KV_DTYPES[cache.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.latent_rope(self._latent_address)
        return q

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert correction is None or correction.dtype == torch.float32
        count = routing.num_chosen
        assert logits.is_contiguous()
        assert logits.dtype == self._dtype
        assert count <= logits.shape[1]
        ids = torch.empty((len(logits), count), dtype=torch.int32)
        weights = torch.empty((len(logits), count), dtype=torch.float32)
        call = self._route
        call.logits = logits.data_ptr()
        call.ids = ids.data_ptr()
        call.weights = weights.data_ptr()
        call.rows, call.experts = logits.shape
        call.chosen = count
        call.correction = None if correction is None else correction.data_ptr()
        call.groups, call.open, call.best = (
            routing.num_groups,
            routing.num_open,
            routing.num_best,
        )
        call.scaling = routing.scaling
        call.scoring = SCORINGS[routing.scoring]
        call.normalise = routing.normalise
        call.threads = torch.get_num_threads()
        self._kernels.route(self._route_address)
        return ids, weights

    def place_experts(
        self,
        ids: torch.Tensor,
        load: torch.Tensor,
        positions: torch.Tensor | None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert places is None or positions is not None
        assert positions is None or positions.dtype == torch.int64
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        assert load.dtype == torch.int64
        slots = ids if places is None else torch.empty_like(ids)
        call = self._placing
        call.ids = ids.data_ptr()
        call.load = load.data_ptr()
        call.positions = None if positions is None else positions.data_ptr()
        call.places = None if places is None else places.data_ptr()
        call.slots = slots.data_ptr()
        call.rows, call.chosen = ids.shape
        call.width = 0 if places is None else places.shape[1]
        self._kernels.place_experts(self._placing_address)
        return slots

    def combine(
        self,
        parts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = [each for each in (parts, shared, gate) if each is not None]
        assert all(each.dtype == self._dtype and each.is_contiguous() for each in given)
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        out = torch.empty((len(weights), parts.shape[1]), dtype=self._dtype)
        call = self._combine
        call.parts = parts.data_ptr()
        call.weights = weights.data_ptr()
        call.shared = None if shared is None else shared.data_ptr()
        call.gate = None if gate is None else gate.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.chosen = weights.shape
        call.cols = parts.shape[1]
        call.threads = torch.get_num_threads()
        self._kernels.combine(self._combine_address)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._prepare_gated(gate_up)
        self._kernels.silu_mul(self._gated_address)
        return out

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._prepare_gated(gate_up)
        self._kernels.gelu_tanh_mul(self._gated_address)
        return out

    def clamped_swiglu_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        out = self._prepare_gated(gate_up)
        self._gated.alpha, self._gated.limit = alpha, limit
        self._kernels.clamped_swiglu_mul(self._gated_address)
        return out

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        assert logits.is_contiguous()
        call = self._capped
        call.x = logits.data_ptr()
        call.rows, call.cols = logits.shape
        call.cap = cap
        call.dtype = DTYPES[logits.dtype]
        call.threads = torch.get_num_threads()
        self._kernels.soft_cap(self._capped_address)
        return logits

    def _prepare_gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Fill the struct of the call. Returns its output tensor."""
        assert gate_up.is_contiguous()
        assert gate_up.dtype == self._dtype
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=self._dtype)
        call = self._gated
        call.gate_up = gate_up.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.cols = out.shape
        call.threads = torch.get_num_threads()
        return out


def create(dtype: torch.dtype, *, level: str | None = None) -> CpuOps:
    """The operations at the given level (None: the best). Raises KernelsUnavailable with the reason
    if they cannot run."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the C++ kernels take bf16 and fp32, not {dtype}")
    return CpuOps(dtype, load(level))
