"""The group of options "Mixtures of experts"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Mixtures of experts"


class ExpertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about where the experts of a mixture lie."""

    ep_size: Annotated[
        int,
        Option(
            GROUP,
            "Number of ranks that divide the experts among themselves, each expert whole: 1 (every"
            " rank has a part of every expert) or the value of --tp-size. The answers have the"
            " same bits, on CPUs.",
            low=1,
            high=64,
        ),
    ] = 1
    moe_a2a_backend: Annotated[
        str,
        Option(
            GROUP,
            "How ranks exchange what their experts compute. none: in the same way as all other"
            " exchanges, through shared memory or torch.distributed.",
            choices=("none",),
        ),
    ] = "none"
    moe_dense_tp_size: Annotated[
        int | None,
        Option(
            GROUP,
            "With --ep-size above 1: 1 gives every rank all of the MLPs that are not among the"
            " chosen experts (dense MLPs and shared experts), which takes more memory"
            " and saves exchanges. If not given, the ranks divide them.",
            choices=(1,),
        ),
    ] = None
    ep_num_redundant_experts: Annotated[
        int,
        Option(
            GROUP,
            "Additional slots per layer, over all ranks, for copies of experts; needs --ep-size"
            " above 1. Experts with many tokens get them, and their tokens are divided among"
            " several ranks.",
            low=0,
            high=4096,
        ),
    ] = 0
    init_expert_location: Annotated[
        str,
        Option(
            GROUP,
            "Which experts lie in which slots at first. trivial: one after the other. Otherwise a"
            " JSON file with physical_to_logical_map (the expert in each slot, for each layer with"
            " experts) or logical_count (the tokens of each expert, from which Setpoint computes"
            " the slots).",
            metavar="trivial|FILE",
        ),
    ] = "trivial"
    enable_eplb: Annotated[
        bool,
        Option(
            GROUP,
            "Balance the experts' load: place the experts anew from time to time while serving, by"
            " the tokens that each has got. A rank reads the experts that it gets from the"
            " checkpoint, one layer between two steps.",
        ),
    ] = False
    eplb_rebalance_num_iterations: Annotated[
        int,
        Option(
            GROUP,
            "Number of steps of the engine (prefill or decode) from one balancing to the next"
            " (--enable-eplb).",
            low=1,
        ),
    ] = 1000
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        Option(
            GROUP,
            "Place experts anew only if the balancedness of the ranks since the last balancing is"
            " at most this (--enable-eplb).",
            low=0,
            high=1,
        ),
    ] = 1.0
    expert_distribution_recorder_mode: Annotated[
        str | None,
        Option(
            GROUP,
            "What /start_expert_distribution_record records: stat is the number of tokens of each"
            " expert.",
            choices=("stat",),
            no_effect="the tokens are always counted",
        ),
    ] = None
