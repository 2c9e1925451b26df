"""The job that the engine process gets from its parent: one JSON line on its standard input. No
pickle, nothing on a command line."""

from __future__ import annotations

import msgspec

from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.core.operations import StorageOrder


class EngineJob(msgspec.Struct, frozen=True):
    config: ResolvedConfig
    spec: ModelSpec
    folder: str
    tokenizer_folder: str | None
    """The folder of the tokenizer; None with --skip-tokenizer-init."""
    rank: int | None
    """Its data-parallel rank; None if it is the only engine."""
    memory_bytes: int | None
    """The maximum memory that an engine on a CPU may use, because others load at the same time;
    None: all that is free."""
    tells_prefixes: bool
    """Whether the engine reports which prefixes its cache holds."""
    handover_key: str = ""
    """The key that the processes of a prefill server share (``core.handshake``), in hex."""
    is_standby: bool = False
    """Whether another engine serves meanwhile. The memory of that engine is free again before this
    one's pool is used."""
    weights_folder: str = ""
    """See ``EngineConfig``."""
    storage: StorageOrder | None = None
    """What operators have decided about the storage of cached prefixes; None: that of the
    configuration."""
    is_restart: bool = False
    """Whether its rank has had an engine before. The server serves, so what an engine can do
    without ends nothing any more."""


def encode_job(job: EngineJob) -> bytes:
    return msgspec.json.encode(job) + b"\n"


def decode_job(line: bytes) -> EngineJob:
    """The job in a line. Raises msgspec.DecodeError, for example for an empty line (the parent
    ended before it sent a job)."""
    return msgspec.json.decode(line, type=EngineJob)
