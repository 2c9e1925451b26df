"""Makes the response object: the fields that it repeats from the request, its status, its items and
its token counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.openai.responses.body import ResponsesBody
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.refusal import Refusal

_LATER = ("status", "completed_at", "error", "incomplete_details", "output", "usage")
"""The fields of a response that change while it runs."""


class ResponseHead:
    """The part of a response that is known when the request begins."""

    def __init__(
        self, fields: dict[str, Any], *, reasoning_tokens: Callable[[SequenceOutput], int]
    ) -> None:
        """fields: see ``of``. reasoning_tokens: how many tokens of a sequence are reasoning."""
        self.id: str = fields["id"]
        self._fields = fields
        self._reasoning_tokens = reasoning_tokens

    @classmethod
    def of(
        cls,
        own_id: str,
        body: ResponsesBody,
        sampling: SamplingParams,
        config: FrontendConfig,
        *,
        warnings: Sequence[str],
        reasoning_tokens: Callable[[SequenceOutput], int],
    ) -> ResponseHead:
        """The head of a new response."""
        all_warnings = [*warnings, *body.other_model(config.served_model_name)]
        text = body.text
        fields = {
            "id": own_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": config.served_model_name,
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": msgspec.to_builtins(body.reasoning)
            if body.reasoning is not None
            else {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        } | ({"warnings": all_warnings} if all_warnings else {})
        return cls(fields, reasoning_tokens=reasoning_tokens)

    @classmethod
    def again(
        cls, response: dict[str, Any], *, reasoning_tokens: Callable[[SequenceOutput], int]
    ) -> ResponseHead:
        """The head with which a response was made earlier."""
        fields = {key: value for key, value in response.items() if key not in _LATER}
        return cls(fields, reasoning_tokens=reasoning_tokens)

    def begun(self, status: str) -> dict[str, Any]:
        """The response before it has an answer."""
        return self._with(status, [], None)

    def ended(self, output: SequenceOutput, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The response after the engine has ended it: completed, cut off by a limit or inside a
        call, or aborted."""
        finish = output.finish
        assert finish is not None
        usage = self._usage(output)
        if finish.type == "abort":
            refusal = Refusal(message=finish.message or "The request was aborted.", status_code=500)
            return self.failed(refusal, items, usage)
        if finish.type == "length":
            return self._incomplete("max_output_tokens", items, usage)
        if any(item["status"] == "incomplete" for item in items):
            return self._incomplete("incomplete_call", items, usage)
        return self._with("completed", items, usage) | {"completed_at": int(time.time())}

    def _incomplete(
        self, reason: str, items: Sequence[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        details = {"reason": reason}
        return self._with("incomplete", items, usage) | {"incomplete_details": details}

    def failed(
        self,
        refusal: Refusal,
        items: Sequence[dict[str, Any]],
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        code = "server_error" if refusal.status_code >= 500 else "invalid_prompt"
        error = {"code": code, "message": refusal.message}
        return self._with("failed", items, usage) | {"error": error}

    def cancelled(self, output: SequenceOutput, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._with("cancelled", items, self._usage(output))

    def _with(
        self, status: str, items: Sequence[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            **self._fields,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(items),
            "usage": usage,
        }

    def _usage(self, output: SequenceOutput) -> dict[str, Any]:
        return {
            "input_tokens": output.num_prompt,
            # Every prompt is cached without being asked for, and nothing is charged for it.
            "input_tokens_details": {"cached_tokens": output.num_cached, "cache_write_tokens": 0},
            "output_tokens": output.num_outputs,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(output)},
            "total_tokens": output.num_prompt + output.num_outputs,
        }
