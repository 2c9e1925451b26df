"""Implements the routes about models: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/pull`` and
``/api/version``."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from setpoint.core.errors import EngineDeadError
from setpoint.core.version import __version__
from setpoint.frontend.apis.ollama.ollama_answers import stamp, stamp_of
from setpoint.frontend.apis.ollama.ollama_bodies import PullBody, ShowBody
from setpoint.frontend.service import Service

OLLAMA_VERSION = "0.12.6"
"""The version of Ollama whose API these routes follow. Clients compare it with the version that
they need."""

_NEVER = stamp_of(datetime(9999, 12, 31, tzinfo=UTC))
_CENTURY_S = 100 * 365 * 86400.0
"""Later dates are not distinguished from never; the largest have no name."""
_GIB = 1 << 30
_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class ModelApi:
    def __init__(self, service: Service, models: Sequence[Service]) -> None:
        """models: all models of the server, in their order."""
        self._service = service
        self._models = models
        self._config = service.config
        self._started_at = stamp()

    def tags(self) -> dict[str, Any]:
        """The answer of ``/api/tags``: all models, loaded or not."""
        models = [ModelApi(each, self._models) for each in self._models]
        return {
            "models": [
                each._entry() | {"modified_at": self._started_at, "size": each._size()}
                for each in models
            ]
        }

    async def running(self) -> dict[str, Any]:
        """The answer of ``/api/ps``: the loaded models. Raises EngineDeadError if there is one
        model and its engine has ended."""
        loaded = [each for each in self._models if each.residence.state == "loaded"]
        found = []
        for each in loaded:
            try:
                found.append(await ModelApi(each, self._models)._running())
            except EngineDeadError:
                if len(self._models) == 1:
                    raise
        return {"models": found}

    async def _running(self) -> dict[str, Any]:
        line = self._service.engine.choose()
        usage = (await line.get_state()).report.memory_usage
        size = round((usage.weight + usage.kvcache + usage.graph) * _GIB)
        left_s = self._service.residence.expires_in_s
        ends = _NEVER if left_s > _CENTURY_S else stamp_of(datetime.now(UTC) + timedelta(0, left_s))
        return self._entry() | {
            "size": size,
            "size_vram": size if line.facts.accelerator else 0,
            "expires_at": ends,
            "context_length": self._config.max_model_len,
        }

    def version(self) -> dict[str, Any]:
        return {"version": OLLAMA_VERSION, "setpoint_version": __version__}

    async def pull(self, raw: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """The statuses of ``/api/pull``, and whether the client asked for a stream of them. There
        is nothing to download: the served model is loaded and answers under any name."""
        body, warnings = self._service.answering.parser.read(raw, PullBody, route="/api/pull")
        warnings += body.warnings(self._config.served_model_name)
        digest, size = self._entry()["digest"], self._size()
        return [
            {"status": "pulling manifest"},
            {
                "status": f"pulling {digest[:12]}",
                "digest": f"sha256:{digest}",
                "total": size,
                "completed": size,
            },
            *({"status": f"nothing is downloaded: {warning}"} for warning in warnings),
            {"status": "success"} | _warnings_field(warnings),
        ], body.stream is not False

    async def show(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``/api/show``."""
        body, warnings = self._service.answering.parser.read(raw, ShowBody, route="/api/show")
        warnings += body.warnings(self._config.served_model_name)
        template = self._service.answering.text.chat_template or ""
        parameters = self._parameters()
        modelfile = [
            f"FROM {self._service.weights.model_path}",
            *([f'TEMPLATE """{template}"""'] if template else ()),
            *(f"PARAMETER {each}" for each in parameters),
        ]
        return {
            "modified_at": self._started_at,
            "details": self._details(),
            "model_info": self._model_info(),
            "capabilities": self._capabilities(),
            "parameters": "\n".join(parameters),
            "template": template,
            "modelfile": "\n".join(modelfile) + "\n",
            "license": await asyncio.to_thread(self._service.checkpoints.license),
            **_warnings_field(warnings),
        }

    def _parameters(self) -> list[str]:
        """The room of a request and the recommended sampling, in the words of a Modelfile."""
        names = {"repetition_penalty": "repeat_penalty"}
        defaults = self._config.sampling_defaults.items()
        return [
            f"num_ctx {self._config.max_model_len}",
            *(f"{names.get(name, name)} {value}" for name, value in defaults),
        ]

    def _entry(self) -> dict[str, Any]:
        config, weights = self._config, self._service.weights
        identity = f"{weights.model_path}\n{weights.version}"
        return {
            "name": config.served_model_name,
            "model": config.served_model_name,
            # A digest of the names, not of the file. Clients distinguish models by it.
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        spec = self._config.spec
        details = {"parent_model": "", "format": "", "family": "", "families": []}
        if spec is None:
            return {**details, "parameter_size": "", "quantization_level": ""}
        blocks = spec.blocks
        is_gguf = blocks is not None and spec.config.get("quantization_config") is None
        return {
            "parent_model": "",
            "format": "gguf" if is_gguf else "safetensors",
            "family": spec.model_type,
            "families": [spec.model_type],
            "parameter_size": _short_count(spec.num_parameters),
            "quantization_level": (
                _LEVELS.get(spec.dtype, spec.dtype) if blocks is None else "+".join(blocks.kinds)
            ),
        }

    def _size(self) -> int:
        """Bytes of the weights in the checkpoint."""
        spec = self._config.spec
        if spec is None:
            return 0
        blocks = spec.blocks
        if blocks is None:
            return spec.num_parameters * _BYTES[spec.dtype]
        rest = max(0, spec.num_parameters - blocks.num_parameters)
        return blocks.num_bytes + rest * _BYTES[spec.dtype]

    def _model_info(self) -> dict[str, Any]:
        """Facts under the names that a GGUF file gives them."""
        spec = self._config.spec
        if spec is None:
            return {}
        family = spec.model_type
        return {
            "general.architecture": family,
            "general.basename": self._config.served_model_name,
            "general.parameter_count": spec.num_parameters,
            f"{family}.context_length": self._config.context_len,
            f"{family}.block_count": spec.num_layers,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.feed_forward_length": spec.intermediate_size,
            f"{family}.attention.head_count": spec.num_heads,
            f"{family}.attention.head_count_kv": spec.num_kv_heads,
            f"{family}.vocab_size": spec.vocab_size,
        }

    def _capabilities(self) -> list[str]:
        config = self._config
        if config.pooling is not None:
            return ["embedding"]
        able = {
            "completion": True,
            # If a model's template does not support tools, the prompt itself asks for calls.
            "tools": config.tool_call_parser != "none"
            or not self._service.answering.text.template_reads("tools"),
            "thinking": config.reasoning_parser != "none",
        }
        return [name for name, is_able in able.items() if is_able]


def _warnings_field(warnings: list[str]) -> dict[str, Any]:
    return {"warnings": warnings} if warnings else {}


def _short_count(count: int) -> str:
    """A number of parameters in short form: 134.5M, 7.2B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
