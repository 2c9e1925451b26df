"""The first half of the options (see ``options``): what is served, on which address, and what
answers look like. Names, meanings and defaults are SGLang 0.5.23's."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.chat_formats import NONE, OPEN, REASONING_PARSERS, TOOL_CALL_PARSERS
from setpoint.config.declare import Option, Range

MODEL = "Model and numerics"
SERVER = "Server"
SERVING = "Answers"
RECORDING = "Recording"


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None and "auto" mean "choose for me" until ``resolve`` has chosen."""

    # -- Model and numerics
    model_path: Annotated[
        str | None,
        Option(
            MODEL,
            "Folder, GGUF file or Hugging Face id. Not given: the default model,"
            " SmolLM2-135M-Instruct.",
            metavar="MODEL",
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None,
        Option(MODEL, "Folder or id of the tokenizer, if it is not the model's.", metavar="PATH"),
    ] = None
    served_model_name: Annotated[
        str | None,
        Option(
            MODEL,
            "Name of the model in the API; the model path if not given. No colon.",
            metavar="NAME",
        ),
    ] = None
    revision: Annotated[
        str | None, Option(MODEL, "Branch, tag or commit of a Hugging Face id.")
    ] = None
    load_format: Annotated[
        str,
        Option(
            MODEL,
            "Format of the weights; auto goes by the files found, dummy makes random weights.",
            choices=("auto", "safetensors", "gguf", "dummy"),
        ),
    ] = "auto"
    model_impl: Annotated[
        str,
        Option(
            MODEL,
            "Whose model code runs: setpoint (SGLang's word sglang means the same), or that of the"
            " transformers library on this engine's attention and cache; auto takes the first where"
            " it knows the architecture.",
            choices=("auto", "setpoint", "sglang", "transformers"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            MODEL,
            "Type of weights and activations; auto follows the checkpoint (float32, and on a CPU"
            " float16, become bfloat16). half is float16, float is float32.",
            choices=("auto", "half", "float16", "bfloat16", "float", "float32", "float64"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Option(
            MODEL,
            "w8a8_int8 rounds weights to 8 bits when they are loaded, with a scale per output"
            " channel, and activations with a scale per token (CPU only); unquant keeps weights in"
            " --dtype. If not given, they are kept as the checkpoint has them, a GGUF's blocks"
            " included.",
            choices=("w8a8_int8", "unquant"),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(
            MODEL,
            "Type of the KV cache; auto is the dtype of the model. With fp8_e4m3 or fp8_e5m2, a"
            " pool of the same size holds twice the tokens of bf16; keys and values are rounded to"
            " 8 bits, without scales, and attention computes in the dtype of the model.",
            choices=("auto", "bf16", "bfloat16", "fp32", "float32", "fp8_e4m3", "fp8_e5m2"),
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        Option(
            MODEL,
            "Maximum length of a sequence, prompt and output together; the model's own limit if not"
            " given.",
            low=8,
            human=True,
        ),
    ] = None
    json_model_override_args: Annotated[
        str,
        Option(
            MODEL,
            "JSON object whose keys replace those of the model's config.json.",
            metavar="JSON",
        ),
    ] = "{}"
    is_embedding: Annotated[
        bool,
        Option(
            MODEL,
            "Serve embeddings of a decoder model instead of text: /v1/embeddings and /encode.",
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        Option(
            MODEL,
            "A .jinja or .json file with the chat template; the model's own if not given.",
            metavar="FILE",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Option(
            MODEL,
            "JSON object with variables for the chat template, such as"
            ' {"enable_thinking": false}; a request\'s chat_template_kwargs win.',
            metavar="JSON",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Option(
            MODEL,
            "Format of the model's tool calls; auto chooses by the chat template, none leaves"
            " calls in"
            " the text (docs/tools-and-reasoning.md).",
            choices=(OPEN, NONE, *TOOL_CALL_PARSERS),
            metavar="FORMAT",
        ),
    ] = OPEN
    reasoning_parser: Annotated[
        str,
        Option(
            MODEL,
            "Format of the model's reasoning; auto chooses by the chat template, none leaves it in"
            " the text (docs/tools-and-reasoning.md).",
            choices=(OPEN, NONE, *REASONING_PARSERS),
            metavar="FORMAT",
        ),
    ] = OPEN
    weight_version: Annotated[
        str, Option(MODEL, "Version name of the weights, shown in answers and /model_info.")
    ] = "default"

    # -- Server
    host: Annotated[str, Option(SERVER, "Address to listen on.", server_only=True)] = "127.0.0.1"
    port: Annotated[
        int, Option(SERVER, "Port to listen on.", low=1, high=65535, server_only=True)
    ] = 30000
    api_key: Annotated[
        str | None,
        Option(
            SERVER,
            "Require 'Authorization: Bearer KEY'; every client is served if not given.",
            metavar="KEY",
            secret=True,
            server_only=True,
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Option(
            SERVER,
            "Key for the routes that change the server (flush, abort, pause, memory, weights, …);"
            " --api-key if not given.",
            metavar="KEY",
            secret=True,
            server_only=True,
        ),
    ] = None
    update_weights_folder: Annotated[
        str | None,
        Option(
            SERVER,
            "Folder below which /update_weights_from_disk may read checkpoints. Without it, the"
            " route"
            " can only read the served model again.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None
    max_body_bytes: Annotated[
        int | None,
        Option(
            SERVER,
            "Largest request body; larger ones are answered 413. If not given: 16 bytes for each"
            " token of the context length, and at least 4Mi, which holds long lists of prompts. A"
            " larger body makes the other clients wait longer while it is read.",
            metavar="BYTES",
            low=1024,
            human=True,
            server_only=True,
        ),
    ] = None
    skip_server_warmup: Annotated[
        bool,
        Option(
            SERVER,
            "Do not send a warm-up request before the server reports ready.",
            server_only=True,
        ),
    ] = False
    watchdog_timeout: Annotated[
        float,
        Option(
            SERVER,
            "Seconds that the engine may take for one step before it is considered stuck and the"
            " server ends. Time in which the machine or the processes are paused does not count.",
            metavar="SECONDS",
            low=5,
            high=1e9,
        ),
    ] = 300.0
    drain_timeout: Annotated[
        float,
        Option(
            SERVER,
            "Seconds that running requests have to finish after SIGTERM or Ctrl-C, before they are"
            " aborted. The process ends at most two seconds later.",
            metavar="SECONDS",
            low=0,
            high=1e6,
            live=True,
            server_only=True,
        ),
    ] = 30.0
    config: Annotated[
        str | None,
        Option(
            SERVER,
            "YAML file with options (keys as here, without the dashes); the command line wins.",
            metavar="FILE",
        ),
    ] = None

    # -- Answers
    stream_interval: Annotated[
        int,
        Option(
            SERVING,
            "Tokens between two pieces of a streamed answer.",
            low=1,
            tunable=Range(1, 64, log=True),
            live=True,
        ),
    ] = 1
    incremental_streaming_output: Annotated[
        bool,
        Option(
            SERVING,
            "Pieces of a native stream hold only the new text; otherwise each piece repeats the"
            " text so far.",
            server_only=True,
        ),
    ] = False
    stream_response_default_include_usage: Annotated[
        bool,
        Option(
            SERVING,
            "OpenAI streams end with a usage chunk unless the request says otherwise.",
            server_only=True,
        ),
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Option(
            SERVING,
            "Every chunk of an OpenAI stream has the usage so far, and the last one the whole,"
            " whatever the request says.",
            server_only=True,
        ),
    ] = False
    enable_cache_report: Annotated[
        bool,
        Option(
            SERVING, "Report cached prompt tokens in usage.prompt_tokens_details of OpenAI answers."
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool,
        Option(
            SERVING,
            "Let requests ask for the hidden states of their tokens (return_hidden_states).",
        ),
    ] = False
    allow_auto_truncate: Annotated[
        bool, Option(SERVING, "Cut a prompt that is too long instead of refusing it.")
    ] = False
    refuse_unknown_keys: Annotated[
        bool,
        Option(
            SERVING,
            "Answer 400 to a body with an unknown key, instead of ignoring the key and saying so.",
            server_only=True,
        ),
    ] = False
    sampling_defaults: Annotated[
        str,
        Option(
            SERVING,
            "Where OpenAI endpoints take unset sampling values from: the model's"
            " generation_config.json, or OpenAI's defaults.",
            choices=("model", "openai"),
        ),
    ] = "model"
    preferred_sampling_params: Annotated[
        str | None,
        Option(
            SERVING,
            "JSON object with default sampling parameters for requests to /generate.",
            metavar="JSON",
            server_only=True,
        ),
    ] = None

    file_storage_path: Annotated[
        str | None,
        Option(
            SERVING,
            "Store uploaded files and batches in this folder (/v1/files, /v1/batches;"
            " docs/batches.md). Clients can then fill up to 64 GiB of the disk. Without it, both"
            " routes answer 400.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None

    # -- Recording
    record: Annotated[
        str | None,
        Option(
            RECORDING,
            "Record what enters and leaves the engine to this new file, for 'setpoint replay'"
            " (docs/recording.md).",
            metavar="FILE",
        ),
    ] = None
    record_content: Annotated[
        str,
        Option(
            RECORDING,
            "off: the recording holds lengths and hashes, and no text, token id or name of a"
            " client; on: token ids and names, too.",
            choices=("off", "on"),
        ),
    ] = "off"
    record_max_bytes: Annotated[
        int,
        Option(
            RECORDING,
            "Largest size of the recording. It is divided into 16 files, and beyond this size the"
            " oldest is deleted; what is left can be printed, not replayed.",
            low=1 << 20,
            human=True,
        ),
    ] = 1 << 30
