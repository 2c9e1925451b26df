"""The ``options`` of Ollama's bodies, and their conversion to sampling parameters. Pure data and
conversions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from setpoint.core.bounds import INT32_MAX
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.bodies import naming_as_sent

DEFAULT_NEW_TOKENS = 2048
"""Maximum new tokens of a request without ``num_predict``, as in SGLang."""


class OptionsBody(msgspec.Struct, kw_only=True):
    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None
    """-1, -2 and 0 mean up to the end of the context."""
    num_ctx: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    """0 means the whole vocabulary."""
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Parameters of other samplers, which are refused unless they turn the sampler off.
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    # Settings of Ollama's computation, and parameters of the samplers above. They have no effect.
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    repeat_last_n: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """The limit of new tokens; None means up to the end of the context."""
        if self.num_predict is None:
            return DEFAULT_NEW_TOKENS
        return self.num_predict if self.num_predict > 0 else None

    def sampling(
        self, defaults: Mapping[str, float], schema: dict[str, Any] | None
    ) -> SamplingParams:
        """The sampling parameters except the limit of new tokens: the request's values, then the
        model's defaults, then the engine's. schema: the JSON schema that the answer must satisfy.
        Raises RequestError (400)."""
        for name, off in (("mirostat", 0), ("tfs_z", 1), ("typical_p", 1)):
            if getattr(self, name) not in (None, off):
                raise RequestError(f"options.{name} is not supported by this server.")
        own = {name: getattr(self, sent) for name, sent in _NAMES.items()}
        if self.top_k == 0:
            own["top_k"] = -1
        raw: dict[str, Any] = {
            **defaults,
            **{name: value for name, value in own.items() if value is not None},
            "max_new_tokens": None,
        }
        if schema is not None:
            raw["json_schema"] = schema
        # "stop" is also an ordinary word in error messages.
        names = {name: f"options.{sent}" for name, sent in _NAMES.items() if name != "stop"}
        with naming_as_sent(names | {"json_schema": "format"}):
            return SamplingParams.parse(raw)

    def warnings(self, context_len: int) -> list[str]:
        """Warnings for the client about options that are ignored."""
        idle = [name for name in _IDLE if getattr(self, name) is not None]
        if self.num_ctx is not None and self.num_ctx != context_len:
            idle.append("num_ctx")
        if not idle:
            return []
        verb = "has" if len(idle) == 1 else "have"
        return [
            f"options: {', '.join(idle)} {verb} no effect here"
            + (f"; the context has {context_len} tokens." if "num_ctx" in idle else ".")
        ]


_NAMES: Mapping[str, str] = {
    "sampling_seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Sampling parameter -> its name in ``options``."""

_IDLE = OptionsBody.__struct_fields__[OptionsBody.__struct_fields__.index("mirostat_tau") :]
"""Options without effect."""
