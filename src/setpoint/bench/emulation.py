"""Refuses to time an engine whose matrix tiles are emulated."""

from __future__ import annotations

from setpoint.core.errors import ConfigError


def refuse_emulation(info: object) -> None:
    """Raise ConfigError if ``info``, what an engine says of itself, says that its instructions are
    emulated. Anything may be given: other servers say other things."""
    if isinstance(info, dict) and info.get("kernels_emulated"):
        raise ConfigError(
            f"SETPOINT_CPU_ISA of the engine asks for {info.get('kernel_level')}, which exists for"
            " tests: its times say nothing about any machine."
        )
