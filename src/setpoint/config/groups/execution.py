"""The group of options "Execution"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option, Range

GROUP = "Execution"


class ExecutionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step runs, and on which implementations."""

    device: Annotated[
        str,
        Option(
            GROUP,
            "Where the model runs; auto takes an NVIDIA GPU if there is one.",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Option(
            GROUP,
            "Attention implementation: torch_ref is the definition and runs everywhere"
            " (torch_native, SGLang's name for plain torch, means it), cpu is C++ for x86.",
            choices=("auto", "torch_ref", "torch_native", "cpu"),
        ),
    ] = "auto"
    enable_torch_compile: Annotated[
        bool,
        Option(
            GROUP,
            "Compile the torch operations of small steps, if there are any and compiling pays;"
            " start-up reports the result.",
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
            "Number of compute threads on a CPU; if not given, the number of cores that this"
            " process may use.",
            low=1,
            high=4096,
            tunable=Range(1, 256, log=True),
        ),
    ] = None
    disable_cuda_graph: Annotated[
        bool,
        Option(
            GROUP,
            "Run every step through the model's own code instead of replaying a captured one; on a"
            " CPU as well.",
        ),
    ] = False
    grammar_backend: Annotated[
        str,
        Option(
            GROUP,
            "Library that constrains outputs to a schema, an expression or a grammar; none refuses"
            " such requests. xgrammar must be installed: `pip install 'setpoint[xgrammar]'`.",
            choices=("llguidance", "xgrammar", "none"),
        ),
    ] = "llguidance"
    random_seed: Annotated[
        int | None,
        Option(GROUP, "Seed of everything random; drawn at start if not given.", low=0),
    ] = None
