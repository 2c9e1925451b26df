"""The part of the server's configuration that the frontend needs; the launcher builds it from the
resolved options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from setpoint.core.model import ModelSpec, Pooling
from setpoint.frontend.bootstrap_rooms import Sharing
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig


@dataclass(slots=True, frozen=True)
class FrontendConfig:
    model_path: str
    served_model_name: str
    tokenizer_path: str
    context_len: int
    max_req_input_len: int
    """``EngineFacts.max_req_input_len``: prompts of this many tokens or more do not fit the
    pool."""
    vocab_size: int
    """Size of the model's vocabulary (which may pad the tokenizer's); prompt ids must be below
    it."""
    pool_tokens: int | None = None
    """Size of the KV pool of one engine; None: it holds the whole context."""
    random_seed: int = 0
    """Seed of the generator that draws a seed for every request without one."""
    pooling: Pooling | None = None
    """If set, the server embeds and does not generate."""
    hidden_size: int | None = None
    """Length of a hidden state; None: clients get none."""
    api_keys: tuple[str, ...] = ()
    """The keys of clients; none: everybody is served."""
    admin_api_key: str | None = None
    """Key of the routes for operators; None: ``api_keys`` are theirs too."""
    follows_bootstrap_room: bool = False
    """Whether the field ``bootstrap_room`` of a body chooses the engine, and must be there."""
    sharing: Sharing = field(default_factory=Sharing)
    """How the server reads in which bootstrap room another server computes a part of a request."""
    max_body_bytes: int = 4 << 20
    """Larger request bodies are refused with status 413."""
    allow_auto_truncate: bool = False
    refuse_unknown_keys: bool = False
    """Refuse unknown keys; otherwise they are ignored, and the answer says so."""
    incremental_streaming_output: bool = False
    enable_cache_report: bool = False
    stream_include_usage: bool = False
    """Whether OpenAI streams without ``stream_options`` end with a usage chunk."""
    stream_always_usage: bool = False
    """Whether every chunk of such a stream has the usage, whatever the request says."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty of generation_config.json, for the
    OpenAI routes."""
    preferred_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of ``/generate`` for requests that do not set them."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them."""
    spec: ModelSpec | None = None
    """The dimensions of the model, for clients that show them."""
    model_info: Mapping[str, Any] = field(default_factory=dict)
    """More fields of ``/model_info``: model_type, architectures, load_format, …"""
    server_info: Mapping[str, Any] = field(default_factory=dict)
    """Options as resolved at the start, version and start-up times, flattened, for
    ``/server_info``."""
    tool_call_parser: str = "none"
    """The name of the format of tool calls (``chat/formats``); "none" leaves calls in the text."""
    reasoning_parser: str = "none"
    """The name of the format of reasoning; "none" leaves it in the text."""
    metrics: MetricsConfig | None = None
    """If set, the server counts, and serves ``/metrics``."""
    storage_backend: str | None = None
    """The storage of cached prefixes, if there is one."""
    weight_version: str = "default"
    """At the start, like ``model_path``; ``ServedWeights`` has those of the present weights."""
    profiles_folder: str = "/tmp"
    """Clients' profiles are written in this folder or below it."""
    expert_records_folder: str = "/tmp"
    """Records of the experts' tokens are written in this folder."""
    health_generates: bool = True
    """Whether ``/health`` asks the engine for a token; otherwise it reports on the frontend alone.
    ``/health_generate`` always asks."""
    health_timeout_s: float = 20.0
    """How long ``/health`` waits for a sign of life from the engine."""
    watchdog_s: float = 300.0
    """How long an engine may compute one step before it is taken to hang and is ended."""

    @property
    def max_model_len(self) -> int:
        """The tokens that a request has room for, prompt and answer together: the context length,
        or the size of a pool that is smaller."""
        pool = self.pool_tokens
        return self.context_len if pool is None else min(self.context_len, pool)
