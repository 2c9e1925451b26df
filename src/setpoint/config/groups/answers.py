"""The group of options "Answers"."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from setpoint.config.groups.declare import Option, Range
from setpoint.config.groups.values import json_object
from setpoint.core.errors import ConfigError, RequestError
from setpoint.core.sampling import SamplingParams

GROUP = "Answers"


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the form of answers, and about what the server stores for clients."""

    stream_interval: Annotated[
        int,
        Option(
            GROUP,
            "Number of tokens in each piece of a streamed answer.",
            low=1,
            tunable=Range(1, 64, log=True),
            live=True,
        ),
    ] = 1
    incremental_streaming_output: Annotated[
        bool,
        Option(
            GROUP,
            "Each piece of a /generate stream holds only the new text, not all text so far.",
            server_only=True,
        ),
    ] = False
    stream_response_default_include_usage: Annotated[
        bool,
        Option(
            GROUP,
            "End OpenAI streams with a usage chunk unless the request says otherwise.",
            server_only=True,
        ),
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Option(
            GROUP,
            "Put the usage so far into every chunk of an OpenAI stream, and the total into the"
            " last one, whatever the request says.",
            server_only=True,
        ),
    ] = False
    enable_cache_report: Annotated[
        bool,
        Option(
            GROUP, "Report cached prompt tokens in usage.prompt_tokens_details of OpenAI answers."
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool,
        Option(
            GROUP,
            "Let requests ask for the hidden states of their tokens (return_hidden_states).",
        ),
    ] = False
    allow_auto_truncate: Annotated[
        bool, Option(GROUP, "Truncate a prompt that is too long instead of refusing it.")
    ] = False
    refuse_unknown_keys: Annotated[
        bool,
        Option(
            GROUP,
            "Answer 400 to a body with an unknown key, instead of ignoring the key with a warning.",
            server_only=True,
        ),
    ] = False
    sampling_defaults: Annotated[
        str,
        Option(
            GROUP,
            "Default sampling values of the OpenAI endpoints: those in the model's"
            " generation_config.json (model), or OpenAI's (openai).",
            choices=("model", "openai"),
        ),
    ] = "model"
    preferred_sampling_params: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON object with default sampling parameters for requests to /generate.",
            metavar="JSON",
            server_only=True,
        ),
    ] = None
    file_storage_path: Annotated[
        str | None,
        Option(
            GROUP,
            "Store uploaded files and batches (/v1/files, /v1/batches; docs/batches.md) and"
            " responses in the background (docs/responses.md) in this folder. Clients can then"
            " fill up to 64 GiB of the disk. Without this option, both routes answer 400, and"
            " responses in the background end with the server.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None


def preferred_sampling(options: AnswerOptions) -> dict[str, Any]:
    """``--preferred-sampling-params`` as a dict. Raises ConfigError for values that a request may
    not have."""
    flag = "--preferred-sampling-params"
    given = json_object(
        flag, options.preferred_sampling_params or "{}", example='{"temperature": 0.6}'
    )
    try:
        SamplingParams.parse(given)
    except RequestError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return given
