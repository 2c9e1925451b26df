"""The operations in Triton, as one object. Importing it imports Triton."""

from __future__ import annotations

from setpoint.engine.kernels.triton import choosing, gates, norms, placing, rotary, routing
from setpoint.engine.kernels.triton import sampling as sampling_kernels


class TritonOps:
    """Implements ``kernels.ops.Ops`` for tensors in bf16, fp16 and fp32 on a GPU. Nothing waits for
    the device."""

    sampling = sampling_kernels
    place_tokens = staticmethod(placing.place_tokens)
    embedding = staticmethod(placing.embedding)
    place_experts = staticmethod(placing.place_experts)
    best_tokens = staticmethod(choosing.best_tokens)
    top_tokens = staticmethod(choosing.top_tokens)
    log_sum_exp = staticmethod(choosing.log_sum_exp)
    mask_tokens = staticmethod(choosing.mask_tokens)
    soft_cap = staticmethod(choosing.soft_cap)
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    rope_and_store = staticmethod(rotary.rope_and_store)
    rope_and_store_latent = staticmethod(rotary.rope_and_store_latent)
    route = staticmethod(routing.route)
    combine = staticmethod(routing.combine)
    silu_mul = staticmethod(gates.silu_mul)
    gelu_tanh_mul = staticmethod(gates.gelu_tanh_mul)
    clamped_swiglu_mul = staticmethod(gates.clamped_swiglu_mul)
