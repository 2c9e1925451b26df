"""Refuses to time an engine whose matrix tiles are emulated."""

from __future__ import annotations

from setpoint.core.errors import ConfigError


def refuse_emulation(info: object) -> None:
    """Raise ConfigError if ``info``, the answer of a server to ``/server_info``, says that the
    engine's instructions are emulated. It may be anything: other servers answer differently."""
    if isinstance(info, dict) and info.get("kernels_emulated"):
        raise ConfigError(
            f"SETPOINT_CPU_ISA of the engine asks for {info.get('kernel_level')}, which exists for"
            " tests: its times say nothing about any machine."
        )
