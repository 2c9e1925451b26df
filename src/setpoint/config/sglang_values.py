"""Values that SGLang accepts for an option whose choices here are fewer."""

from __future__ import annotations

KNOWN_VALUES = {
    "grammar_backend": ("xgrammar", "outlines"),
    "model_impl": ("mindspore",),
    "quantization": (
        *(
            "awq",
            "awq_marlin",
            "fp8",
            "mxfp8",
            "gptq",
            "gptq_marlin",
            "bitsandbytes",
            "gguf",
            "modelopt",
            "modelopt_fp8",
            "modelopt_fp4",
        ),
        *(
            "modelopt_mixed",
            "nvfp4_online",
            "petit_nvfp4",
            "w8a8_fp8",
            "moe_wna16",
            "w4afp8",
            "mxfp4",
            "auto-round",
            "auto-round-int8",
        ),
        *(
            "compressed-tensors",
            "modelslim",
            "mxfp_w4a8",
            "quark",
            "quark_int4fp8_moe",
            "quark_mxfp4",
            "mlx_q4",
            "mlx_q8",
            "humming",
        ),
    ),
    "kv_cache_dtype": ("fp8_e5m2", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16"),
    "device": ("xpu", "npu", "hpu", "mps", "musa"),
    "load_format": (
        *(
            "pt",
            "npcache",
            "sharded_state",
            "presharded",
            "bitsandbytes",
            "layered",
            "flash_rl",
            "remote",
            "remote_instance",
        ),
        *(
            "fastsafetensors",
            "runai_streamer",
            "mistral",
            "instanttensor",
            "expert_pack",
            "private",
        ),
    ),
    "attention_backend": (
        *(
            "triton",
            "torch_native",
            "flex_attention",
            "dsa",
            "nsa",
            "qsa",
            "dsv4",
            "compressed",
            "fa3",
            "fa4",
            "flashinfer",
            "flashmla",
        ),
        *(
            "cutlass_mla",
            "trtllm_mla",
            "trtllm_mha",
            "cutedsl_mla",
            "tokenspeed_mla",
            "hpc_ops",
            "aiter",
            "wave",
        ),
        *("intel_amx", "ascend", "intel_xpu"),
    ),
}
"""Values that SGLang takes for an option and this version does not."""
_PARALLEL_SIZES = ("tp_size", "dp_size", "pp_size", "ep_size")


def is_known_value(field: str, value: object) -> bool:
    """Whether SGLang accepts ``value`` for an option that has fewer choices here."""
    return value in KNOWN_VALUES.get(field, ()) or (
        field in _PARALLEL_SIZES and isinstance(value, int) and value > 1
    )
