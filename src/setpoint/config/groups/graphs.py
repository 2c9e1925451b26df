"""The group of options "Graphs"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option
from setpoint.core.errors import ConfigError

GROUP = "Graphs"
KINDS = ("decode", "prefill")
MOST = 65_536
"""The largest size of a graph. Lists of sizes are made before memory is planned, so a mistyped
number must not fill the host's."""


class GraphOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about steps that are captured at the start and replayed. All but
    --disable-cuda-graph are for GPUs (docs/gpu.md)."""

    disable_cuda_graph: Annotated[
        bool,
        Option(
            GROUP,
            "Run every step through the model's code instead of replaying a captured step. This"
            " applies to CPUs as well.",
        ),
    ] = False
    disable_decode_cuda_graph: Annotated[
        bool, Option(GROUP, "Capture no graphs of decode steps on a GPU.")
    ] = False
    disable_prefill_cuda_graph: Annotated[
        bool, Option(GROUP, "Capture no graphs of steps with prompt tokens on a GPU.")
    ] = False
    cuda_graph_backend_decode: Annotated[
        str | None,
        Option(
            GROUP,
            "How decode steps are captured on a GPU: each as one graph (full), or not at all.",
            choices=("full", "disabled"),
        ),
    ] = None
    cuda_graph_backend_prefill: Annotated[
        str | None,
        Option(
            GROUP,
            "How steps with prompt tokens are captured on a GPU: each as one graph (full), or not"
            " at all. breakable is taken as full.",
            choices=("full", "breakable", "disabled"),
        ),
    ] = None
    cuda_graph_max_bs_decode: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum requests in a decode step that is replayed from a graph on a GPU. If not"
            " given, it follows from the GPU's memory and --max-running-requests.",
            low=1,
            high=MOST,
        ),
    ] = None
    cuda_graph_max_bs_prefill: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum tokens in a step with prompt tokens that is replayed from a graph on a GPU;"
            " 512, or a chunk if that is smaller, if not given.",
            low=1,
            high=MOST,
        ),
    ] = None
    cuda_graph_bs_decode: Annotated[
        tuple[int, ...],
        Option(
            GROUP,
            "The sizes for which decode steps are captured on a GPU, in requests. A step between"
            " two sizes runs as the larger one.",
            low=1,
            high=MOST,
        ),
    ] = ()
    cuda_graph_bs_prefill: Annotated[
        tuple[int, ...],
        Option(
            GROUP,
            "The sizes for which steps with prompt tokens are captured on a GPU, in tokens.",
            low=1,
            high=MOST,
        ),
    ] = ()


def check_graphs(options: GraphOptions) -> None:
    """Raise ConfigError for sizes that are no sizes, and for options that contradict each other."""
    for kind in KINDS:
        most, flag = (
            getattr(options, f"cuda_graph_max_bs_{kind}"),
            f"--cuda-graph-max-bs-{kind}",
        )
        sizes, listed = getattr(options, f"cuda_graph_bs_{kind}"), f"--cuda-graph-bs-{kind}"
        switch = f"--disable-{kind}-cuda-graph"
        for name, values in ((flag, () if most is None else (most,)), (listed, sizes)):
            if any(value < 1 for value in values):
                raise ConfigError(
                    f"{name} must be at least 1, got {min(values)}. For no such graphs give"
                    f" {switch}."
                )
        if sorted(set(sizes)) != list(sizes):
            ascending = " ".join(map(str, sorted(set(sizes))))
            raise ConfigError(
                f"{listed} must name each size once, in ascending order: write {ascending}."
            )
        if sizes and most not in (None, sizes[-1]):
            raise ConfigError(
                f"{flag} {most} contradicts {listed}, whose largest size is {sizes[-1]}; leave"
                f" {flag} out."
            )
        backend = getattr(options, f"cuda_graph_backend_{kind}")
        if getattr(options, f"disable_{kind}_cuda_graph") and backend not in (None, "disabled"):
            raise ConfigError(
                f"--cuda-graph-backend-{kind} {backend} and {switch} contradict each other; leave"
                " one of them out."
            )
