"""The one table of spellings: what a user may write for an option, and what SGLang knows that is not here yet.

Works on option names and values as text. It does not parse command lines: ``commandline`` does, and asks here.
"""

from __future__ import annotations

import difflib
from collections.abc import Set

from setpoint.config.options import OPTION_FIELDS
from setpoint.config.sglang_known import KNOWN
from setpoint.core.errors import ConfigError

ALIASES = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--expert-parallel-size": "--ep-size",
    "--ep": "--ep-size",
    # Older guides: the name is gone from SGLang 0.5.23, where it became the decode one.
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
}
"""Other spellings of an option, supported or not."""

NOTED = {
    "--enable-overlap-scheduler": "accepted for older guides; steps overlap by default where the device allows it",
}
"""Accepted without effect, with the words of the decision that says so."""

SUPPORTED = {field.flag: field for field in OPTION_FIELDS}
"""Options of a server and its engine, by canonical spelling. A command may have more of its own (see ``commands``)."""

KNOWN_VALUES = {
    "model_impl": ("mindspore",),
    "quantization": (
        *("awq", "awq_marlin", "fp8", "mxfp8", "gptq", "gptq_marlin", "bitsandbytes", "gguf", "modelopt", "modelopt_fp8", "modelopt_fp4"),
        *("modelopt_mixed", "nvfp4_online", "petit_nvfp4", "w8a8_fp8", "moe_wna16", "w4afp8", "mxfp4", "auto-round", "auto-round-int8"),
        *("compressed-tensors", "modelslim", "mxfp_w4a8", "quark", "quark_int4fp8_moe", "quark_mxfp4", "mlx_q4", "mlx_q8", "humming"),
    ),
    "kv_cache_dtype": ("fp8_e5m2", "fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16"),
    "device": ("xpu", "npu", "hpu", "mps", "musa"),
    "load_format": (
        *("pt", "npcache", "sharded_state", "presharded", "bitsandbytes", "layered", "flash_rl", "remote", "remote_instance"),
        *("fastsafetensors", "runai_streamer", "mistral", "instanttensor", "expert_pack", "private"),
    ),
    "attention_backend": (
        *("triton", "torch_native", "flex_attention", "dsa", "nsa", "qsa", "dsv4", "compressed", "fa3", "fa4", "flashinfer", "flashmla"),
        *("cutlass_mla", "trtllm_mla", "trtllm_mha", "cutedsl_mla", "tokenspeed_mla", "hpc_ops", "aiter", "wave"),
        *("intel_amx", "ascend", "intel_xpu"),
    ),
}
"""Values SGLang takes for an option and this version does not."""

_PARALLEL_SIZES = ("tp_size", "dp_size", "pp_size", "ep_size")
_SGLANG = {*KNOWN, *ALIASES, "--help"}


def canonical(
    spelling: str,
    supported: Set[str] = SUPPORTED.keys(),
    *,
    command: str = "'setpoint serve'",
    manual: str = "'setpoint serve --help'",
) -> str:
    """The option meant by ``spelling``: a flag in ``supported`` (those of ``command``), a key of :data:`NOTED`, or ``--help``.

    Accepts aliases and unambiguous prefixes, as SGLang's parser does; a prefix of one of its options is never taken for one
    that only Setpoint has. Raises ConfigError for an option that SGLang knows and this version does not support, for one that
    belongs to another command, for an ambiguous prefix, and for an unknown option (naming the nearest ones).
    """
    spellings = {*_SGLANG, *supported, *NOTED}
    meant = {_target(spelling)} if spelling in spellings else _completions(spelling, spellings)
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    if not meant:
        raise ConfigError(f"unknown option {spelling}.{_suggestion(spelling, spellings, supported, manual)}")
    (flag,) = meant
    if flag in SUPPORTED and flag not in supported:
        raise ConfigError(f"{flag} belongs to 'setpoint serve'; {command} has no use for it.")
    if flag not in supported and flag not in NOTED and flag != "--help":
        written = "" if flag == spelling else f" (written {spelling})"
        raise ConfigError(f"{flag}{written} is an option of SGLang that is not supported by this version of Setpoint yet.")
    return flag


def own_flag(spelling: str, flags: Set[str], *, manual: str) -> str:
    """As :func:`canonical`, for a command that starts no engine: of its own ``flags`` alone."""
    spellings = {*flags, "--help"}
    meant = {spelling} & spellings or {name for name in spellings if name.startswith(spelling)}
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    if not meant:
        raise ConfigError(f"unknown option {spelling}.{_suggestion(spelling, spellings, spellings, manual)}")
    return meant.pop()


def is_known_value(field: str, value: object) -> bool:
    """True if SGLang accepts ``value`` for an option whose choices here are fewer."""
    return value in KNOWN_VALUES.get(field, ()) or (field in _PARALLEL_SIZES and isinstance(value, int) and value > 1)


def noted(given: Set[str]) -> list[tuple[str, str]]:
    """(field name, words) of the spellings in ``given`` that were accepted without effect."""
    return [(name, words) for flag, words in NOTED.items() if (name := field_name(flag)) in given]


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _completions(prefix: str, spellings: Set[str]) -> set[str]:
    complete = [name for name in spellings if name.startswith(prefix)]
    return {_target(name) for name in complete if name in _SGLANG} or {_target(name) for name in complete}


def _target(spelling: str) -> str:
    return ALIASES.get(spelling, spelling)


def _suggestion(spelling: str, spellings: Set[str], supported: Set[str], manual: str) -> str:
    close = difflib.get_close_matches(spelling, sorted(spellings), n=3, cutoff=0.75)
    if close and close[0] in supported:  # a slip in one of ours is the likely case; a refused option would be no help
        close = [name for name in close if name in supported]
    return f" Did you mean {_listed(close, 'or')}?" if close else f" See {manual}."


def _listed(names: list[str], word: str = "and") -> str:
    if len(names) > 6:
        return f"{', '.join(names[:6])} and {len(names) - 6} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
