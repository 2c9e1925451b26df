"""Checks the options about expert parallelism against the model."""

from __future__ import annotations

from setpoint.config.groups.declare import flag_of
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.core.expert_placement import first_placements
from setpoint.core.model import ModelSpec


def check_experts(options: Options, model: ModelSpec) -> None:
    """Raise ConfigError if the experts cannot be divided as asked for."""
    experts, ranks = options.experts, options.parallel.tp_size
    size, redundant = experts.ep_size, experts.ep_num_redundant_experts
    if size == 1:
        for name in (
            *("ep_num_redundant_experts", "init_expert_location", "enable_eplb"),
            "moe_dense_tp_size",
        ):
            value = getattr(experts, name)
            if value not in (0, "trivial", False, None):
                flag = flag_of(name) + ("" if value is True else f" {value}")
                raise ConfigError(
                    f"{flag} is about ranks that hold whole experts; give --ep-size and --tp-size"
                    " above 1, or leave it out."
                )
        return
    if model.mixture is None:
        raise ConfigError(
            f"--ep-size {size} divides experts, and {model.architecture} has none; leave it out."
        )
    if size != ranks:
        raise ConfigError(
            f"--ep-size {size} must be 1 or the number of ranks, --tp-size {ranks}: a rank either"
            " has whole experts or a part of every expert."
        )
    number = model.mixture.num_experts
    if (number + redundant) % size:
        more = -(number + redundant) % size
        raise ConfigError(
            f"--ep-size {size} cannot divide {number} experts"
            + (f" and {redundant} redundant ones" if redundant else "")
            + f" evenly; --ep-num-redundant-experts {redundant + more} would fit."
        )
    first_placements(  # refuses a file that does not fit
        experts.init_expert_location,
        num_layers=len(model.mixture.layers),
        num_experts=number,
        num_slots=number + redundant,
        num_ranks=size,
    )
