"""Names of SGLang's attention and sampling implementations that are refused, each with the reason
and what to take instead."""

from __future__ import annotations

_LIBRARY = "it is a library of its own for {what}, for which there is no adapter; {instead}"
_TRITON = "take triton, Setpoint's own kernels, or leave the option out"
_HOPPER = _LIBRARY.format(what="NVIDIA GPUs from Hopper on", instead=_TRITON)
_BLACKWELL = _LIBRARY.format(what="NVIDIA GPUs from Blackwell on", instead=_TRITON)
_SPARSE = "it is for models with sparse attention, none of which Setpoint serves; leave it out"
_ELSEWHERE = "it is for {what}, and Setpoint runs on CPUs and NVIDIA GPUs; leave it out"
_AMD = _ELSEWHERE.format(what="AMD GPUs")

_ATTENTION = {
    "flashmla": _HOPPER,
    "fa4": _BLACKWELL,
    "cutlass_mla": _BLACKWELL,
    "trtllm_mla": _BLACKWELL,
    "trtllm_mha": _BLACKWELL,
    "cutedsl_mla": _BLACKWELL,
    "tokenspeed_mla": _BLACKWELL,
    "hpc_ops": _HOPPER,
    "flex_attention": (
        "it compiles attention with torch for each shape, and no graph holds it; take triton on a"
        " GPU and cpu on a CPU, or leave the option out"
    ),
    "dsa": _SPARSE,
    "nsa": _SPARSE,
    "qsa": _SPARSE,
    "dsv4": _SPARSE,
    "compressed": _SPARSE,
    "aiter": _AMD,
    "wave": _AMD,
    "intel_amx": "take cpu, which uses AMX where the processor has it, or leave the option out",
    "intel_xpu": _ELSEWHERE.format(what="Intel GPUs"),
    "ascend": _ELSEWHERE.format(what="Ascend NPUs"),
}

_SAMPLING = {
    "flashinfer": (
        "it draws other numbers than Setpoint, whose seeds give the same draws on every device;"
        " leave it out"
    ),
    "intel_xpu": _ATTENTION["intel_xpu"],
    "ascend": _ATTENTION["ascend"],
}

REFUSED_BACKENDS = {
    "attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "decode_attention_backend": _ATTENTION,
    "sampling_backend": _SAMPLING,
}
"""Option -> name -> reason."""
