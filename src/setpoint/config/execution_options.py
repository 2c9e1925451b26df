"""Options of memory, cache and execution: where a step runs, and on which implementations.
``options`` says what is common to all declarations."""

from __future__ import annotations

from typing import Annotated

from setpoint.config.declare import Option, Range
from setpoint.config.scheduling_options import SchedulingOptions

MEMORY = "Memory and cache"
EXECUTION = "Execution"


class ExecutionOptions(SchedulingOptions, frozen=True, kw_only=True):
    """The user's wishes about memory and device."""

    # -- Memory and cache
    mem_fraction_static: Annotated[
        float | None,
        Option(
            MEMORY,
            "Share of the available memory for weights and KV pool together, between 0 and 1. Raise"
            " it if there is no room for the pool, lower it if memory runs out while serving.",
            metavar="SHARE",
            tunable=Range(0.5, 0.95),
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Option(
            MEMORY,
            "Upper bound of the KV pool, in tokens.",
            low=1,
            human=True,
            tunable=Range(4096, 16777216, log=True),
        ),
    ] = None
    page_size: Annotated[
        int, Option(MEMORY, "Tokens in a page of the KV pool.", low=1, tunable=(1, 16, 32, 64))
    ] = 1
    disable_radix_cache: Annotated[
        bool,
        Option(
            MEMORY,
            "Turn the prefix cache off: prefixes of finished requests are neither kept nor"
            " matched.",
        ),
    ] = False
    radix_eviction_policy: Annotated[
        str,
        Option(
            MEMORY,
            "What the prefix cache drops first: the least recently used (lru); the least often hit"
            " (lfu); what was hit less than twice (slru); what low-priority requests left"
            " (priority); tails of conversations whose next prefill stays within a budget without"
            " them (tlru). Among equals the least recently used.",
            choices=("lru", "lfu", "slru", "priority", "tlru"),
            tunable=("lru", "lfu", "slru"),
        ),
    ] = "lru"
    radix_eviction_policy_config: Annotated[
        str,
        Option(
            MEMORY,
            "JSON object with the policy's parameters: slru protected_threshold (hits, 2); tlru"
            " threshold (prompt tokens that may be recomputed per turn) and next_prompt_estimate"
            " (tokens a turn adds).",
            metavar="JSON",
        ),
    ] = "{}"

    # -- Execution
    device: Annotated[
        str,
        Option(
            EXECUTION,
            "Where the model runs; auto takes an NVIDIA GPU if there is one.",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Option(
            EXECUTION,
            "Attention implementation: torch_ref is the definition and runs everywhere"
            " (torch_native, SGLang's name for plain torch, means it), cpu is C++ for x86.",
            choices=("auto", "torch_ref", "torch_native", "cpu"),
        ),
    ] = "auto"
    enable_torch_compile: Annotated[
        bool,
        Option(
            EXECUTION,
            "Compile the torch operations of small steps, if there are any and compiling pays;"
            " start-up reports the result.",
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int,
        Option(EXECUTION, "Maximum tokens of a step that --enable-torch-compile compiles.", low=1),
    ] = 32
    num_threads: Annotated[
        int | None,
        Option(
            EXECUTION,
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
            EXECUTION,
            "Run every step through the model's own code instead of replaying a captured one; on a"
            " CPU as well.",
        ),
    ] = False
    grammar_backend: Annotated[
        str,
        Option(
            EXECUTION,
            "Library that constrains outputs to a schema, an expression or a grammar; none refuses"
            " such requests. xgrammar must be installed: `pip install 'setpoint[xgrammar]'`.",
            choices=("llguidance", "xgrammar", "none"),
        ),
    ] = "llguidance"
    random_seed: Annotated[
        int | None,
        Option(EXECUTION, "Seed of everything random; drawn at start if not given.", low=0),
    ] = None
