"""All options of a server and its engine, each declared once with its name, type, default, help,
choices, bounds and tuning range.

Names, meanings and defaults are SGLang 0.5.23's. The parser, the documentation, ``/server_info``
and the checks are generated from the declarations. Each group of options has a file in
``config.groups``, which also parses the options of the group that have a syntax of their own.
``resolve`` decides what "auto" becomes.
"""

from __future__ import annotations

import shlex
from collections.abc import Set
from typing import Any

import msgspec

from setpoint.config.groups.answers import AnswerOptions
from setpoint.config.groups.compatibility import CompatibilityOptions
from setpoint.config.groups.declare import Option, declared, masked
from setpoint.config.groups.disaggregation import DisaggregationOptions
from setpoint.config.groups.events import EventOptions
from setpoint.config.groups.execution import ExecutionOptions
from setpoint.config.groups.experts import ExpertOptions
from setpoint.config.groups.graphs import GraphOptions
from setpoint.config.groups.logs import LogOptions
from setpoint.config.groups.memory import MemoryOptions
from setpoint.config.groups.metrics import MetricOptions
from setpoint.config.groups.model import ModelOptions
from setpoint.config.groups.parallel import ParallelOptions
from setpoint.config.groups.recording import RecordingOptions
from setpoint.config.groups.scheduling import SchedulingOptions
from setpoint.config.groups.server import ServerOptions
from setpoint.config.groups.tiers import TierOptions
from setpoint.config.groups.traces import TraceOptions


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a server and its engine as the user gave them, in groups. None and "auto" mean
    "choose for me" until ``resolve`` has chosen.

    Code reads ``options.memory.page_size``. Users do not know the groups, so code that gets names
    from users calls ``of``, ``get`` and ``replace``. No two groups have an option of the same name.
    """

    model: ModelOptions = ModelOptions()
    server: ServerOptions = ServerOptions()
    answers: AnswerOptions = AnswerOptions()
    recording: RecordingOptions = RecordingOptions()
    scheduling: SchedulingOptions = SchedulingOptions()
    memory: MemoryOptions = MemoryOptions()
    tiers: TierOptions = TierOptions()
    execution: ExecutionOptions = ExecutionOptions()
    graphs: GraphOptions = GraphOptions()
    logs: LogOptions = LogOptions()
    metrics: MetricOptions = MetricOptions()
    traces: TraceOptions = TraceOptions()
    events: EventOptions = EventOptions()
    parallel: ParallelOptions = ParallelOptions()
    experts: ExpertOptions = ExpertOptions()
    disaggregation: DisaggregationOptions = DisaggregationOptions()
    compatibility: CompatibilityOptions = CompatibilityOptions()

    @classmethod
    def of(cls, **values: Any) -> Options:
        """Options with these values, given by name."""
        return cls().replace(**values)

    def get(self, name: str) -> Any:
        """The value of the option with this name."""
        return getattr(getattr(self, GROUP_OF[name]), name)

    def replace(self, **values: Any) -> Options:
        """A copy of these options with new values, given by name."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(GROUP_OF[name], {})[name] = value
        changed = {
            group: msgspec.structs.replace(getattr(self, group), **own)
            for group, own in groups.items()
        }
        return msgspec.structs.replace(self, **changed)


GROUPS = {group.name: declared(group.type, Option) for group in msgspec.structs.fields(Options)}
"""Name of a group -> its options, in the order of the help."""
GROUP_OF = {field.name: group for group, fields in GROUPS.items() for field in fields}
"""Name of an option -> name of its group."""
OPTION_FIELDS = tuple(field for fields in GROUPS.values() for field in fields)


def server_args(options: Options) -> dict[str, Any]:
    """The options as ``/server_info`` shows them: every value, secrets masked."""
    return {field.name: masked(field, options.get(field.name)) for field in OPTION_FIELDS}


def launch_command(options: Options, given: Set[str]) -> str:
    """A command that starts a server with the options that were given; secrets are masked."""
    words = ["setpoint", "serve"]
    for field in OPTION_FIELDS:
        value = options.get(field.name)
        if field.name in given and field.kind is not bool:
            values = value if field.is_list else [value]
            words += [field.flag, *(str(masked(field, each)) for each in values)]
        elif field.name in given and value:
            words.append(field.flag)
    return shlex.join(words)
