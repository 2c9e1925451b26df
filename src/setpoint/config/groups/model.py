"""The group of options "Model and numerics"."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from setpoint.config.groups.chat_formats import NONE, OPEN, REASONING_PARSERS, TOOL_CALL_PARSERS
from setpoint.config.groups.declare import Option
from setpoint.config.groups.values import json_object

GROUP = "Model and numerics"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is served: the model, its numbers, and how its chats are written."""

    model_path: Annotated[
        str | None,
        Option(
            GROUP,
            "Folder, GGUF file or Hugging Face id. Not given: the default model,"
            " SmolLM2-135M-Instruct.",
            metavar="MODEL",
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None,
        Option(GROUP, "Folder or id of the tokenizer, if it is not the model's.", metavar="PATH"),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        Option(
            GROUP,
            "Serve token ids only: /generate takes input_ids and answers output_ids, what needs"
            " text is refused, and no tokenizer file is read. For the server and the offline"
            " Engine.",
        ),
    ] = False
    served_model_name: Annotated[
        str | None,
        Option(
            GROUP,
            "Name of the model in the API; the model path if not given. No colon.",
            metavar="NAME",
        ),
    ] = None
    revision: Annotated[
        str | None, Option(GROUP, "Branch, tag or commit of a Hugging Face id.")
    ] = None
    load_format: Annotated[
        str,
        Option(
            GROUP,
            "Format of the weights; auto goes by the files found, dummy makes random weights.",
            choices=("auto", "safetensors", "gguf", "dummy"),
        ),
    ] = "auto"
    model_impl: Annotated[
        str,
        Option(
            GROUP,
            "Whose model code runs: setpoint (SGLang's word sglang means the same), or that of the"
            " transformers library on this engine's attention and cache; auto takes the first where"
            " it knows the architecture.",
            choices=("auto", "setpoint", "sglang", "transformers"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            GROUP,
            "Type of weights and activations; auto follows the checkpoint (float32, and on a CPU"
            " float16, become bfloat16). half is float16, float is float32.",
            choices=("auto", "half", "float16", "bfloat16", "float", "float32", "float64"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Option(
            GROUP,
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
            GROUP,
            "Type of the KV cache; auto is the dtype of the model. With fp8_e4m3 or fp8_e5m2, a"
            " pool of the same size holds twice the tokens of bf16; keys and values are rounded to"
            " 8 bits, without scales, and attention computes in the dtype of the model.",
            choices=("auto", "bf16", "bfloat16", "fp32", "float32", "fp8_e4m3", "fp8_e5m2"),
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum length of a sequence, prompt and output together; the model's own limit if not"
            " given.",
            low=8,
            human=True,
        ),
    ] = None
    json_model_override_args: Annotated[
        str,
        Option(
            GROUP,
            "JSON object whose keys replace those of the model's config.json.",
            metavar="JSON",
        ),
    ] = "{}"
    is_embedding: Annotated[
        bool,
        Option(
            GROUP,
            "Serve embeddings of a decoder model instead of text: /v1/embeddings and /encode.",
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        Option(
            GROUP,
            "A .jinja or .json file with the chat template; the model's own if not given.",
            metavar="FILE",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON object with variables for the chat template, such as"
            ' {"enable_thinking": false}; a request\'s chat_template_kwargs win.',
            metavar="JSON",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Option(
            GROUP,
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
            GROUP,
            "Format of the model's reasoning; auto chooses by the chat template, none leaves it in"
            " the text (docs/tools-and-reasoning.md).",
            choices=(OPEN, NONE, *REASONING_PARSERS),
            metavar="FORMAT",
        ),
    ] = OPEN
    weight_version: Annotated[
        str, Option(GROUP, "Version name of the weights, shown in answers and /model_info.")
    ] = "default"


def model_overrides(options: ModelOptions) -> dict[str, Any]:
    """``--json-model-override-args`` as a dict. Raises ConfigError if it is not a JSON object."""
    return json_object(
        "--json-model-override-args",
        options.json_model_override_args,
        example='{"rope_theta": 10000}',
    )


def chat_template_kwargs(options: ModelOptions) -> dict[str, Any]:
    """``--default-chat-template-kwargs`` as a dict. Raises ConfigError if it is not a JSON
    object."""
    return json_object(
        "--default-chat-template-kwargs",
        options.default_chat_template_kwargs or "{}",
        example='{"enable_thinking": false}',
    )
