"""The frontend's one shared object: configuration, engine, text work and request bookkeeping, as the routes use them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from setpoint.core.errors import EngineDeadError
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.core.stats import RequestStats
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import Intake, Options, new_rid
from setpoint.frontend.ipc.client import EngineClient, EngineState, Mailbox
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.text.processor import TextProcessor

logger = logging.getLogger(__name__)

_LOGGED_CHARS = 2048
"""Length to which log level 2 cuts texts and id lists."""


class RequestBook:
    """Finished requests as their clients saw them; outlives the engine."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        """num_requests, num_aborted, prompt_tokens, cached_tokens, generation_tokens."""
        self.recent: deque[RequestStats] = deque(maxlen=1024)

    def record(self, stats: RequestStats) -> None:
        self.recent.append(stats)
        self.totals.update(
            num_requests=1,
            num_aborted=int(stats.finish == "abort"),
            prompt_tokens=stats.num_prompt,
            cached_tokens=stats.num_cached,
            generation_tokens=stats.num_output,
        )


class Service:
    def __init__(self, config: FrontendConfig, engine: EngineClient, text: TextProcessor) -> None:
        self.config = config
        self.engine = engine
        self.text = text
        self.intake = Intake(config, text)
        self.book = RequestBook()
        self._unlogged: set[str] = set()
        """rids of running requests that asked for ``no_logs``."""

    def job(self, requests: Sequence[Request], *, no_logs: bool = False) -> Job:
        if no_logs:
            self._unlogged.update(request.rid for request in requests)
        return Job(self.engine, self.text.tokenizer, requests, on_finish=self._finished)

    def log_received(self, body: dict[str, Any], *, openai: bool) -> None:
        if self.config.log_requests:
            logger.info("Receive%s: obj=%s", " OpenAI" if openai else "", self._loggable(body))

    async def is_healthy(self) -> bool:
        """Submit a one-token request; any message of the engine after that is a sign of life."""
        if self.engine.state is not EngineState.READY:
            return False
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        probe = Request(rid=f"HEALTH_CHECK_{new_rid()}", prompt_ids=pack_ids([0]), sampling=sampling)
        mailbox = Mailbox()
        try:
            self.engine.submit(probe, mailbox)
            heard = await self.engine.wait_message(timeout_s=self.config.health_timeout_s)
        except EngineDeadError:
            return False
        finally:
            self.engine.stop(probe.rid, mailbox)
        return heard and self.engine.state is EngineState.READY

    async def warm_up(self, *, timeout_s: float = 600.0) -> None:
        """One real request before the world is told that the server is ready. Raises EngineDeadError or RequestError."""
        prompt = await self.intake.encode("The capital city of France is")
        requests = self.intake.requests(prompt, SamplingParams(max_new_tokens=8, temperature=0.0), Options(), rid=f"WARM_UP_{new_rid()}")
        with Job(self.engine, self.text.tokenizer, requests, on_finish=lambda output: None) as job:
            try:
                await asyncio.wait_for(job.wait(), timeout_s)
            except TimeoutError:
                raise EngineDeadError(f"The warm-up request was not answered within {timeout_s:g} s.") from None
        logger.info("The server is fired up and ready to roll!")

    def _finished(self, output: SequenceOutput) -> None:
        self.book.record(output.stats())
        if output.rid in self._unlogged:
            self._unlogged.discard(output.rid)
        elif self.config.log_requests:
            request = {"rid": output.rid, "sampling_params": msgspec.to_builtins(output.request.sampling)}
            finish = None if output.finish is None else msgspec.to_builtins(output.finish)
            result = {
                "text": output.text,
                "output_ids": output.output_ids,
                "meta_info": {
                    "id": output.rid,
                    "finish_reason": finish,
                    "prompt_tokens": output.num_prompt,
                    "completion_tokens": output.num_outputs,
                    "cached_tokens": output.num_cached,
                    "e2e_latency": output.e2e_s,
                },
            }
            logger.info("Finish: obj=%s, out=%s", self._loggable(request), self._loggable(result))

    def _loggable(self, value: dict[str, Any]) -> str:
        """By ``--log-requests-level``: 0 metadata, 1 + sampling parameters, 2 + contents cut short, 3 everything."""
        level = self.config.log_requests_level
        contents = ("text", "input_ids", "output_ids", "messages", "prompt")
        shown = {}
        for key, item in value.items():
            if key in contents:
                if level < 2:
                    continue
                rendered = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
                shown[key] = (
                    rendered
                    if level >= 3 or len(rendered) <= _LOGGED_CHARS
                    else f"{rendered[:_LOGGED_CHARS]}… ({len(rendered)} characters)"
                )
            elif key in ("rid", "meta_info", "stream", "model") or level >= 1:
                shown[key] = item
        return repr(shown)
