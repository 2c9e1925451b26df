"""The group of options "Model and numerics"."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from setpoint.config.groups.chat_formats import NONE, OPEN, REASONING_PARSERS, TOOL_CALL_PARSERS
from setpoint.config.groups.declare import Option
from setpoint.config.groups.values import json_object

GROUP = "Model and numerics"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the model, its number formats and its chat formats."""

    model_path: Annotated[
        str | None,
        Option(
            GROUP,
            "Folder, GGUF file or Hugging Face id of the model. If not given, the default model,"
            " SmolLM2-135M-Instruct. setpoint serve takes it several times, each time as"
            " NAME=MODEL, and serves all of these models (docs/several-models.md).",
            metavar="MODEL",
            repeats=True,
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None,
        Option(
            GROUP, "Folder or id of the tokenizer. If not given, the model's own.", metavar="PATH"
        ),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        Option(
            GROUP,
            "Serve token ids only: /generate takes input_ids and returns output_ids, requests"
            " that need text are refused, and no tokenizer file is read. For the server and the"
            " offline Engine.",
        ),
    ] = False
    served_model_name: Annotated[
        str | None,
        Option(
            GROUP,
            "Name of the model in the API, without a colon. If not given, the model path.",
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
            "Format of the weights; auto chooses it by the files in the folder, dummy makes"
            " random weights.",
            choices=("auto", "safetensors", "gguf", "dummy"),
        ),
    ] = "auto"
    model_impl: Annotated[
        str,
        Option(
            GROUP,
            "Model code to run: setpoint (SGLang's value sglang means the same) or that of the"
            " transformers library with this engine's attention and cache; auto chooses setpoint"
            " if it has the architecture.",
            choices=("auto", "setpoint", "sglang", "transformers"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            GROUP,
            "Data type of weights and activations; auto follows the checkpoint, but turns"
            " float32, and on a CPU float16, into bfloat16. half means float16, and float means"
            " float32.",
            choices=("auto", "half", "float16", "bfloat16", "float", "float32", "float64"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Option(
            GROUP,
            "w8a8_int8 rounds weights to 8 bits when they are loaded, with one scale per output"
            " channel, and activations with one scale per token. fp8 does so in E4M3, on a CPU"
            " without rounding activations, and may name a folder in fp8. blocks_int8 (CPU only)"
            " leaves the quantized blocks of a GGUF file or quantized folder as they are and rounds"
            " the activations that they are multiplied by to 8 bits, in products of 24 tokens or"
            " more also the weights: it is faster, but answers differ from those in bfloat16 and"
            " depend on the load. unquant keeps weights in --dtype. If not"
            " given, weights stay as they are in the checkpoint, including the quantized blocks of"
            " a GGUF file and the codes of a quantized folder. The other values are names of such"
            " folders, which are recognised without them; a name that does not match is refused.",
            choices=(
                *("w8a8_int8", "blocks_int8", "unquant", "awq", "awq_marlin", "gptq"),
                *("gptq_marlin", "moe_wna16", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4"),
            ),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(
            GROUP,
            "Data type of the KV cache; auto means the model's. With fp8_e4m3 or fp8_e5m2, a"
            " pool of the same size holds twice as many tokens as with bf16: keys and values are"
            " rounded to 8 bits, divided by the scales of the checkpoint if it has any, and"
            " attention computes in the model's data type.",
            choices=("auto", "bf16", "bfloat16", "fp32", "float32", "fp8_e4m3", "fp8_e5m2"),
        ),
    ] = "auto"
    quantization_param_path: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON file with a scale for each layer of a KV cache in fp8, which K and V share, in"
            " place of the checkpoint's (docs/quantization.md).",
            metavar="FILE",
        ),
    ] = None
    context_length: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum length of a sequence, prompt and output together. If not given, the model's"
            " own limit.",
            low=8,
            human=True,
        ),
    ] = None
    json_model_override_args: Annotated[
        str,
        Option(
            GROUP,
            "JSON object whose entries replace those of the model's config.json.",
            metavar="JSON",
        ),
    ] = "{}"
    is_embedding: Annotated[
        bool,
        Option(
            GROUP,
            "Serve embeddings of a decoder model (/v1/embeddings, /encode) instead of generating"
            " text.",
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        Option(
            GROUP,
            "A .jinja or .json file with the chat template. If not given, the model's own.",
            metavar="FILE",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON object with variables for the chat template, such as"
            ' {"enable_thinking": false}; a request\'s chat_template_kwargs override them.',
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
        str, Option(GROUP, "Version name of the weights, shown in answers and in /model_info.")
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
