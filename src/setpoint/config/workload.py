"""Implements ``--workload``: defaults, with reasons, that SGLang's tuning guide of 2026 recommends
for a kind of traffic.

An explicit option always wins, and a value that contradicts the given options is not used. The
table also lists the recommendations that this version cannot follow, so that none is dropped
silently. The guide is about GPU servers; where a machine needs another value, the reason says so.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from setpoint.config.check import check_options
from setpoint.config.groups.declare import Scalar
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.core.limits import CAPTURED_TOKENS
from setpoint.planning.memory import GIB


@dataclass(slots=True, frozen=True)
class Advice:
    """One recommendation of the guide for an option that this version has."""

    option: str
    value: Scalar
    why: str
    elsewhere: Callable[[Hardware, str], tuple[Scalar, str] | None] = lambda hardware, device: None
    """Returns (value, why) if the machine needs another value; the value None leaves the option as
    it is without a profile."""
    essential: bool = False
    """Whether the profile makes little sense without this value. If so, a given option that
    contradicts it causes a warning."""


@dataclass(slots=True, frozen=True)
class Missing:
    """One recommendation that is not followed, mostly because this version lacks the feature, and
    what replaces it."""

    name: str
    why: str
    value: str = "not available yet"


def _few_running(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device != "cpu":
        return None
    why = (
        "small batches keep each step short; on a CPU every further row takes its full time, so"
        " 16 per core, and at most the guide's 128"
    )
    return min(128, 16 * hardware.num_cores), why


def _many_running(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device != "cpu":
        return None
    return (
        256,
        (
            "large batches give throughput; on a CPU a few hundred rows keep every core busy,"
            " and the guide's 4096 would only cause more retractions"
        ),
    )


def _large_chunk(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device == "cpu":
        return (
            None,
            (
                "with the guide's 16384 tokens a step on a CPU would take seconds and gain"
                " nothing: 256 tokens already keep its matrix products busy"
            ),
        )
    if hardware.gpu_bytes is None or hardware.gpu_bytes < LARGE_GPU_BYTES:
        return (
            None,
            (
                "the guide's 16384 tokens need 24 GB in addition to weights and pool, which only a"
                " GPU known to be large has"
            ),
        )
    return None


def _large_share(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device == "cpu":
        return (
            None,
            (
                "the guide's 0.9 is meant for a GPU that does nothing else; a CPU shares its"
                " memory with the whole machine, and its cores are the first limit"
            ),
        )
    if hardware.gpu_bytes is not None and hardware.gpu_bytes * 0.1 < 5 * GIB:
        return (
            None,
            "the guide's 0.9 would leave less than the 5 GB that the guide itself wants to stay"
            " free",
        )
    return None


LARGE_GPU_BYTES = 60 * GIB
"""With at least this much memory, 16384 tokens at 1.5 MB each (docs/sglang/options.md#memory-share)
leave most of a GPU to weights and pool."""

HICACHE = (
    "--hicache-storage-backend file keeps prefixes in files; whether that pays depends on the disk,"
    " so it is left to you"
)

PROFILES: dict[str, tuple[Advice | Missing, ...]] = {
    "online": (
        Advice(
            "max_running_requests",
            128,
            "small batches keep each step, and so the time per token, short; other requests wait"
            " in the queue",
            _few_running,
        ),
        Advice(
            "schedule_conservativeness",
            1.2,
            "the client of a retracted request waits for a second prefill, so admit fewer"
            " requests instead",
        ),
        Missing(
            "cuda_graph_max_bs_decode",
            "the guide captures graphs up to 256 rows; a CPU replays steps of up to"
            f" {CAPTURED_TOKENS} tokens, and a GPU has graphs up to the requests that may run",
            value="as the device needs",
        ),
        Missing(
            "attention_backend",
            "the guide names fa3, trtllm or flashinfer by GPU generation; Setpoint has its own"
            " kernels in Triton, and takes fa3 and flashinfer if they are installed and named",
            value="as the device needs",
        ),
    ),
    "offline": (
        Advice(
            "mem_fraction_static",
            0.9,
            "a larger KV pool holds more requests at once",
            _large_share,
        ),
        Advice(
            "max_running_requests",
            4096,
            "throughput comes from large batches: only memory should limit them",
            _many_running,
        ),
        Advice(
            "schedule_conservativeness",
            0.3,
            "most outputs end before their limit; a full pool is worth an occasional retraction",
        ),
        Advice(
            "chunked_prefill_size",
            16384,
            "long prompts are computed in a few large steps; no client waits for the next token",
            _large_chunk,
        ),
        Missing(
            "dp_size",
            "the guide runs 8 replicas on 8 GPUs; here one engine uses all cores unless you"
            " choose a number of engines",
            value="your choice",
        ),
    ),
    "long-context": (
        Advice(
            "page_size",
            64,
            "fewer, larger pages keep page tables and the tree small; up to 63 tokens per match"
            " are computed again",
        ),
        Advice(
            "schedule_policy",
            "lpm",
            "a long prefix that is still cached is worth more than the order of arrival",
        ),
        Advice(
            "chunked_prefill_size",
            16384,
            "long prompts are computed in a few large steps",
            _large_chunk,
        ),
        Missing(
            "enable_hierarchical_cache",
            f"the guide keeps twice the pool on the host, and more in storage; {HICACHE}",
            value="your choice",
        ),
    ),
    "multi-turn": (
        Advice(
            "disable_radix_cache",
            False,
            "each turn begins with the whole conversation so far, whose prefill the cache saves",
            essential=True,
        ),
        Advice("page_size", 1, "the next turn matches the cache up to its last token"),
        Missing(
            "enable_hierarchical_cache",
            f"the guide keeps waiting conversations in storage; {HICACHE}",
            value="your choice",
        ),
        Missing(
            "disaggregation_mode",
            "the guide separates prefill from decode; one engine process does both in this version",
        ),
    ),
}
"""Profile -> the guide's recommendations, in the guide's order. Each is checked against the given
options in turn."""


@dataclass(slots=True, frozen=True)
class Applied:
    """The options with the values of a profile, and the reasons to report."""

    options: Options
    reasons: dict[str, tuple[str, bool]]
    """Name -> the reason, and whether it is a warning, for every entry of the profile. Not every
    name is an option."""


def apply_profile(options: Options, hardware: Hardware, device: str, *, given: Set[str]) -> Applied:
    """The options with the defaults of their workload. Without a workload, the same object."""
    reasons: dict[str, tuple[str, bool]] = {}
    label, defaults = f"--workload {options.scheduling.workload}", Options()
    for advice in PROFILES.get(options.scheduling.workload or "", ()):
        if isinstance(advice, Missing):
            reasons[advice.name] = f"{label}: {advice.why}", False
            continue
        name, present = advice.option, options.get(advice.option)
        value, why = advice.elsewhere(hardware, device) or (advice.value, advice.why)
        if name in given or present != defaults.get(name):
            contrary = value is not None and present != value
            reasons[name] = (
                f"given; {label} {f'would set {value}' if contrary else 'agrees'}: {why}",
                contrary and advice.essential,
            )
            continue
        candidate = options if value is None else options.replace(**{name: value})
        try:
            check_options(candidate)
        except ConfigError as error:
            reasons[name] = (
                f"{label} would set {value}, which contradicts the given options: {error}",
                True,
            )
        else:
            options, reasons[name] = candidate, (f"{label}: {why}", False)
    return Applied(options, reasons)
