"""What the frontend needs to know of the server's configuration; the launcher builds it from the
resolved options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from setpoint.core.model import Pooling


@dataclass(slots=True, frozen=True)
class FrontendConfig:
    model_path: str
    served_model_name: str
    tokenizer_path: str
    context_len: int
    max_req_input_len: int
    """``Ready.info["max_req_input_len"]``: prompts of this many tokens or more do not fit the
    pool."""
    vocab_size: int
    """Of the model (which may pad the tokenizer's): prompt ids must be below it."""
    random_seed: int = 0
    """Of the generator that draws a seed for every request without one."""
    pooling: Pooling | None = None
    """Set: the server embeds and does not generate."""
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    """Larger request bodies are answered 413."""
    allow_auto_truncate: bool = False
    refuse_unknown_keys: bool = False
    """Otherwise they are ignored, and the answer says so."""
    incremental_streaming_output: bool = False
    enable_cache_report: bool = False
    stream_include_usage: bool = False
    """OpenAI streams without ``stream_options`` end with a usage chunk."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty of generation_config.json, for the
    OpenAI routes."""
    model_info: Mapping[str, Any] = field(default_factory=dict)
    """More fields of ``/model_info``: model_type, architectures, load_format, …"""
    server_info: Mapping[str, Any] = field(default_factory=dict)
    """Options as resolved at the start, version and start-up times, flattened, for
    ``/server_info``."""
    weight_version: str = "default"
    health_generates: bool = True
    """``/health`` asks the engine for a token; otherwise it answers for the frontend alone.
    ``/health_generate`` always asks."""
    health_timeout_s: float = 20.0
    """How long ``/health`` waits for a sign of life of the engine."""
