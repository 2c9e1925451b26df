"""The group of options "Execution"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option, Range
from setpoint.core.errors import ConfigError

GROUP = "Execution"
ATTENTION_BACKENDS = ("auto", "torch_ref", "torch_native", "cpu", "triton", "flashinfer", "fa3")


class ExecutionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the device and the implementations that run a step."""

    device: Annotated[
        str,
        Option(
            GROUP,
            "Device that runs the model; auto chooses an NVIDIA GPU if there is one.",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Option(
            GROUP,
            "Attention implementation: torch_ref is the reference in plain torch and runs"
            " everywhere (SGLang's name torch_native means the same); cpu is C++ for x86; triton is"
            " for GPUs. flashinfer and fa3 call the packages flashinfer-python and sglang-kernel,"
            " which have to be installed; neither has been tried on a GPU.",
            choices=ATTENTION_BACKENDS,
        ),
    ] = "auto"
    prefill_attention_backend: Annotated[
        str | None,
        Option(
            GROUP,
            "Attention implementation of steps with prompt tokens, if not --attention-backend. On a"
            " GPU it may differ from that of decode steps.",
            choices=ATTENTION_BACKENDS,
        ),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        Option(
            GROUP,
            "Attention implementation of decode steps, if not --attention-backend. On a GPU it may"
            " differ from that of steps with prompt tokens.",
            choices=ATTENTION_BACKENDS,
        ),
    ] = None
    sampling_backend: Annotated[
        str,
        Option(
            GROUP,
            "Sampling implementation: Setpoint's own, whose draws do not depend on the device.",
            choices=("pytorch",),
        ),
    ] = "pytorch"
    enable_deterministic_inference: Annotated[
        bool,
        Option(
            GROUP,
            "Promise that a request's bits do not depend on the other requests. Refused where that"
            " is not true; /server_info says which promise holds.",
        ),
    ] = False
    enable_torch_compile: Annotated[
        bool,
        Option(
            GROUP,
            "Compile the torch operations of small steps if that makes them faster; the start-up"
            " log reports the result.",
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int,
        Option(GROUP, "Maximum tokens of a step that --enable-torch-compile compiles.", low=1),
    ] = 32
    num_threads: Annotated[
        int | None,
        Option(
            GROUP,
            "Number of compute threads on a CPU. If not given, one for each core that this"
            " process may use.",
            low=1,
            high=4096,
            tunable=Range(1, 256, log=True),
        ),
    ] = None
    grammar_backend: Annotated[
        str,
        Option(
            GROUP,
            "Library that constrains outputs to a schema, a regular expression or a grammar;"
            " with none, such requests are refused. xgrammar must be installed:"
            " `.venv/bin/pip install -e '.[xgrammar]'`.",
            choices=("llguidance", "xgrammar", "none"),
        ),
    ] = "llguidance"
    constrained_json_max_whitespace_cnt: Annotated[
        int,
        Option(
            GROUP,
            "Most characters of whitespace between two parts of a JSON text that a schema"
            " constrains.",
            low=0,
            high=1024,
        ),
    ] = 64
    constrained_json_disable_any_whitespace: Annotated[
        bool,
        Option(
            GROUP,
            "Allow no whitespace between the parts of a JSON text that a schema constrains: small"
            " models then spend no tokens on it.",
        ),
    ] = False
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        Option(
            GROUP,
            "Regular expression for the whitespace between two parts of a JSON text that a schema"
            " constrains, in place of a number of characters; for --grammar-backend llguidance.",
        ),
    ] = None
    random_seed: Annotated[
        int | None,
        Option(GROUP, "Seed of all random numbers. If not given, one is drawn at start.", low=0),
    ] = None


def check_spacing(options: ExecutionOptions) -> None:
    """Raise ConfigError for an expression that has no effect. Whether it can be compiled is known
    to ``launch.parent.preflight``."""
    name, pattern = (
        "--constrained-json-whitespace-pattern",
        options.constrained_json_whitespace_pattern,
    )
    if pattern is None:
        return
    if not pattern:
        raise ConfigError(
            f"{name} is empty; for JSON without whitespace give"
            " --constrained-json-disable-any-whitespace."
        )
    if options.constrained_json_disable_any_whitespace:
        raise ConfigError(
            f"{name} and --constrained-json-disable-any-whitespace contradict each other."
        )
    if options.grammar_backend != "llguidance":
        raise ConfigError(f"{name} is for --grammar-backend llguidance alone; leave it out.")
