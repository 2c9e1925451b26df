"""Reads the prompts of a body without answering it. The same routes, templates and tokenizer that
would answer the body make its requests, but the requests are not sent. So the ids are those that
the engine will get, in every dialect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any

from rayserve.exchange import HttpRequest, answer
from setpoint.core.errors import RequestError
from setpoint.core.request import Request
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import compose
from setpoint.frontend.http.app import create_app
from setpoint.frontend.job_maker import JobMaker
from setpoint.frontend.jobs import Job
from setpoint.frontend.service import Service

Prompt = tuple[bytes, str]
"""Packed ids and the cache namespace of one sequence."""

_FOUND: ContextVar[list[Prompt] | None] = ContextVar("found", default=None)
"""Collects the prompts that are read in this context; None for an ordinary request."""


class _Reading(JobMaker):
    """Collects requests instead of sending them."""

    def make(self, requests: Sequence[Request], **_: Any) -> Job:
        found = _FOUND.get()
        assert found is not None
        found.extend((each.prompt_ids, each.options.namespace) for each in requests)
        raise RequestError("This request is only read.")


class PromptReader:
    def __init__(self, service: Service) -> None:
        """service: the service that answers requests. It neither counts nor logs what is read
        here."""
        config = replace(service.config, metrics=None)
        reading = compose(config, service.engine, service.answering.text, service.live.options)
        jobs = reading.answering.jobs
        own = _Reading(**{each.name: getattr(jobs, each.name) for each in fields(JobMaker)})
        reading = replace(reading, answering=replace(reading.answering, jobs=own))
        self._app = create_app(reading, DIALECTS)
        logging.getLogger("uvicorn.access").addFilter(lambda record: _FOUND.get() is None)

    async def read(self, request: HttpRequest) -> list[Prompt]:
        """The prompts of a request; an empty list if its body will be refused."""
        found: list[Prompt] = []
        token = _FOUND.set(found)
        try:
            async for _ in answer(self._app, request):
                pass
        finally:
            _FOUND.reset(token)
        return found
