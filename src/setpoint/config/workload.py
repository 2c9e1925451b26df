"""``--workload``: what SGLang's tuning guide of 2026 recommends for a kind of traffic, as defaults
with reasons.

One table. An explicit option always wins, and a value that contradicts the given options is not
used. Recommendations that this version cannot follow are listed too, so that none is dropped in
silence. Pure. The guide speaks of GPU servers; where a machine needs another value, the reason says
so.
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
    """(value, why) if the machine needs another value; a value of None leaves the option as it is
    without a profile."""
    essential: bool = False
    """Whether the profile makes little sense without this value: a given option that contradicts it
    causes a warning."""


@dataclass(slots=True, frozen=True)
class Missing:
    """One recommendation that is not followed, mostly because this version does not have what it
    asks for, and what replaces it."""

    name: str
    why: str
    value: str = "not here yet"
    """What docs/flags.md shows in the place of a value."""


def _few_running(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device != "cpu":
        return None
    why = (
        "small batches keep each step short; on a CPU every further row costs its full time, hence"
        " 16 per core, at most the guide's 128"
    )
    return min(128, 16 * hardware.num_cores), why


def _many_running(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device != "cpu":
        return None
    return (
        256,
        (
            "large batches give throughput; on a CPU a few hundred rows keep every core busy, and"
            " the guide's 4096 would only retract more"
        ),
    )


def _large_chunk(hardware: Hardware, device: str) -> tuple[Scalar, str] | None:
    if device == "cpu":
        return (
            None,
            (
                "the guide's 16384 tokens would stall a CPU for seconds per step and gain nothing:"
                " its products are busy from 256 on"
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
                "the guide's 0.9 is of a GPU that does nothing else; a CPU's memory is the"
                " machine's, and its cores are the limit first"
            ),
        )
    if hardware.gpu_bytes is not None and hardware.gpu_bytes * 0.1 < 5 * GIB:
        return (
            None,
            "the guide's 0.9 would leave less than the 5 GB that it wants free besides the pool",
        )
    return None


LARGE_GPU_BYTES = 60 * GIB
"""With at least this much memory, 16384 tokens at 1.5 MB each (docs/sglang/options.md#memory-share)
leave most of a GPU to weights and pool."""

HICACHE = (
    "host and storage tiers of the cache are not in this version; what does not fit the pool is"
    " computed again"
)

PROFILES: dict[str, tuple[Advice | Missing, ...]] = {
    "online": (
        Advice(
            "max_running_requests",
            128,
            "small batches keep each step, and so each token, short; the rest waits in the queue",
            _few_running,
        ),
        Advice(
            "schedule_conservativeness",
            1.2,
            "a retracted request makes its client wait for a second prefill: admit fewer instead",
        ),
        Missing(
            "cuda_graph_max_bs_decode",
            "the guide captures graphs up to 256 rows; a CPU replays steps of up to"
            f" {CAPTURED_TOKENS} tokens, a GPU none in this version",
        ),
        Missing(
            "attention_backend",
            "the guide names fa3, trtllm or flashinfer by GPU generation; this version has none of"
            " them",
        ),
    ),
    "offline": (
        Advice(
            "mem_fraction_static",
            0.9,
            "a larger KV pool holds more requests at once, and nobody waits for headroom",
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
            "long prompts in few large steps; nobody waits for the next token",
            _large_chunk,
        ),
        Missing(
            "dp_size",
            "the guide runs 8 replicas on 8 GPUs; here one engine has all cores unless you say how"
            " many engines share them",
            value="yours to choose",
        ),
    ),
    "long-context": (
        Advice(
            "page_size",
            64,
            "fewer, larger pages: page tables and the tree stay small, at up to 63 tokens computed"
            " again per match",
        ),
        Advice(
            "schedule_policy",
            "lpm",
            "a long prefix that is still cached is worth more than the order of arrival",
        ),
        Advice("chunked_prefill_size", 16384, "long prompts in few large steps", _large_chunk),
        Missing(
            "enable_hierarchical_cache",
            f"the guide keeps twice the pool on the host, and more in storage; {HICACHE}",
        ),
    ),
    "multi-turn": (
        Advice(
            "disable_radix_cache",
            False,
            "each turn begins with the whole conversation so far: its cache is what saves the"
            " prefill",
            essential=True,
        ),
        Advice("page_size", 1, "the next turn matches to the last token"),
        Missing(
            "enable_hierarchical_cache",
            f"the guide lets waiting conversations rest in storage; {HICACHE}",
        ),
        Missing(
            "disaggregation_mode",
            "the guide separates prefill from decode; one engine process does both in this version",
        ),
    ),
}
"""Profile -> the guide's recommendations, in the guide's order; each is checked against the given
options in turn."""


@dataclass(slots=True, frozen=True)
class Applied:
    """Options with a profile's values filled in, and the reasons to report."""

    options: Options
    reasons: dict[str, tuple[str, bool]]
    """Name -> reason, and whether it is a warning, for everything in the profile; not every name is
    an option."""


def apply_profile(options: Options, hardware: Hardware, device: str, *, given: Set[str]) -> Applied:
    """The options with the defaults of their workload; the same object without a workload."""
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
                f"given; {label} {f'would take {value}' if contrary else 'agrees'}: {why}",
                contrary and advice.essential,
            )
            continue
        candidate = options if value is None else options.replace(**{name: value})
        try:
            check_options(candidate)
        except ConfigError as error:
            reasons[name] = (
                f"{label} would take {value}, which does not go with the given options: {error}",
                True,
            )
        else:
            options, reasons[name] = candidate, (f"{label}: {why}", False)
    return Applied(options, reasons)
