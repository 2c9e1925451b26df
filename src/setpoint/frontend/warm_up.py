"""The first request of a server, before it is announced as ready."""

from __future__ import annotations

import numpy as np

from setpoint.core.awake import timeout_awake
from setpoint.core.errors import EngineDeadError
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.answering import Answering
from setpoint.frontend.intake import new_rid
from setpoint.frontend.jobs import Job

NUM_IDS = 6
"""Tokens of the request on a server without a tokenizer."""


async def warm_up(answering: Answering, *, timeout_s: float = 600.0) -> None:
    """Have an engine compute one real request. Raises EngineDeadError or RequestError."""
    config, intake, tokenizer = answering.config, answering.intake, answering.text.known_tokenizer
    if tokenizer is None:
        prompt = np.arange(min(NUM_IDS, config.vocab_size), dtype=np.int32)
    else:
        prompt = await intake.encode("The capital city of France is")
    prompt = prompt[: config.max_req_input_len - 1]
    rid, sampling = f"WARM_UP_{new_rid()}", SamplingParams(max_new_tokens=8, temperature=0.0)
    if config.pooling is None:
        requests = intake.requests(prompt, sampling, RequestOptions(), rid=rid)
    else:
        requests = [intake.embedding_request(prompt, rid=rid)]
    with Job(answering.engine, tokenizer, requests, on_finish=lambda output: None) as job:
        try:
            async with timeout_awake(timeout_s):
                await job.wait()
        except TimeoutError:
            raise EngineDeadError(
                f"The warm-up request was not answered within {timeout_s:g} s."
            ) from None
