"""Settles changes of a running server's options: which options may change, and how a change affects
the others.

A change is settled like a start: the options are resolved again as the user gave them, and the new
values count as given. Choices, bounds, cross checks, derived values and warnings are therefore the
same as at a start. Options that are not live keep the values that the start settled. Pure; knows
neither engine nor frontend.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from setpoint.config import sglang
from setpoint.config.commandline import converter
from setpoint.config.decisions import Decision
from setpoint.config.dp_attention import of_all_engines
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.declare import Field, Option, Scalar
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.config.pool import PoolConfig, resolve_pool
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.control import OptionChange
from setpoint.core.conversion import as_whole
from setpoint.core.errors import ConfigError
from setpoint.core.model import ModelSpec

LIVE = tuple(field for field in OPTION_FIELDS if field.about.live)
_DEFAULTS = {field.name: field.default for field in LIVE}
_FIELDS = {field.flag: field for field in OPTION_FIELDS}
_DECIDED = frozenset(field.name for field in LIVE) | {"decode_after_piece"}
"""Decisions that a change may replace."""


@dataclass(slots=True, frozen=True)
class ConfigInputs:
    """All inputs of a configuration (see ``resolve``)."""

    options: Options
    """Options as the user wrote them."""
    given: frozenset[str]
    hardware: Hardware
    model: ModelSpec
    found: Mapping[str, tuple[str, str]]
    env: EnvSettings
    drawn_seed: int

    def resolve(self) -> ResolvedConfig:
        """Resolve these inputs. Raises ConfigError."""
        return resolve(
            self.options,
            self.hardware,
            self.model,
            given=self.given,
            found=self.found,
            env=self.env,
            drawn_seed=self.drawn_seed,
        )

    def with_values(self, values: Mapping[str, Scalar]) -> ConfigInputs:
        """A copy of these inputs with other values for some options. None sets an option to its
        default, as if it had not been given."""
        given = {name for name, value in values.items() if value is not None}
        new = {name: values[name] if name in given else _DEFAULTS[name] for name in values}
        return replace(
            self,
            options=self.options.replace(**new),
            given=(self.given - values.keys()) | given,
        )


@dataclass(slots=True, frozen=True)
class Running:
    """The configuration of a serving engine, and the inputs that it follows from."""

    asked: ConfigInputs
    config: ResolvedConfig
    pool: PoolConfig
    num_slots: int
    """Number of sequences that the engine has room for."""
    step_tokens: int
    """Prompt tokens of the largest step that memory was planned for."""

    @staticmethod
    def started(asked: ConfigInputs, config: ResolvedConfig, pool_tokens: int) -> Running:
        pool = resolve_pool(config, pool_tokens)
        return Running(asked, config, pool, pool.max_running_requests, config.step_tokens)

    def with_values(self, values: Mapping[str, Scalar]) -> Running:
        """The configuration of this engine after these live options have changed, to the values
        that ``live_options`` then has. Raises ConfigError for values that a start would refuse, and
        for values for which the engine has no room."""
        parallel = self.asked.options.parallel
        if parallel.enable_dp_attention:
            values = of_all_engines(values, parallel.dp_size)
        asked = self.asked.with_values(values)
        settled = asked.resolve()
        live = {field.name: settled.options.get(field.name) for field in LIVE}
        anew = {decision.field: decision for decision in settled.decisions}
        config = replace(
            self.config,
            options=self.config.options.replace(**live),
            decode_after_piece=settled.decode_after_piece,
            decisions=tuple(
                anew.get(old.field, old) if old.field in _DECIDED else old
                for old in self.config.decisions
            ),
        )
        pool = resolve_pool(config, self.pool.max_total_num_tokens)
        after = replace(self, asked=asked, config=config, pool=pool)
        self._check_room(after)
        return after

    def _check_room(self, after: Running) -> None:
        wanted, room = after.pool.max_running_requests, self.num_slots
        if wanted > room:
            raise ConfigError(
                f"--max-running-requests {wanted} is more than the {room} requests for which this"
                " engine has room. Restart the server with this value to make more room."
            )
        chunk, page = after.config.chunked_prefill_size, self.config.page_size
        if chunk > 0 and chunk % page:
            raise ConfigError(
                f"--chunked-prefill-size {chunk} is not divisible by the {page} tokens of this"
                f" engine's pages; use a multiple such as {-(-chunk // page) * page}."
            )
        wanted, room = after.config.step_tokens, self.step_tokens
        if wanted > room:
            raise ConfigError(
                f"a step could have {wanted} prompt tokens (--chunked-prefill-size; without"
                " chunks --max-prefill-tokens and the context), but memory was planned for"
                f" {room}. Restart the server with this value to plan for more."
            )

    def differences(self, before: Running) -> list[OptionChange]:
        """The options whose values have changed, including those that follow from others."""
        old, new = before.values(), self.values()
        return [OptionChange(name, old[name], new[name]) for name in new if old[name] != new[name]]

    def live_options(self) -> dict[str, Scalar]:
        """Settled values of the live options; the number of running requests is limited by the
        pool."""
        found = {field.name: self.config.options.get(field.name) for field in LIVE}
        return found | {"max_running_requests": self.pool.max_running_requests}

    def values(self) -> dict[str, Scalar]:
        """The live options in force, and the values derived from them."""
        return self.live_options() | {
            "min_free_slots_delay": self.pool.min_free_slots,
            "decode_after_piece": self.config.decode_after_piece,
        }

    def decisions_since(self, start: Running) -> list[Decision]:
        """The decisions that have changed since ``start``."""
        before = {*start.config.decisions, *start.pool.decisions}
        now = *self.config.decisions, *self.pool.decisions
        return [each for each in now if each.field in _DECIDED and each not in before]

    def warnings(self, values: Mapping[str, Scalar]) -> list[str]:
        """The warnings that a start would give about the options that were asked for."""
        decisions = (*self.config.decisions, *self.pool.decisions)
        return [str(each) for each in decisions if each.warn and each.field in values]


def read_values(given: Mapping[str, Any]) -> dict[str, Scalar]:
    """Parse names and values. Names must be written in full, because a typing error would change a
    running server. Values have the option's type or are text as on a command line. null (in text:
    none) resets an option and becomes None. Raises ConfigError, also for an option that is not
    live."""
    values: dict[str, Scalar] = {}
    for name, value in given.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        field = _FIELDS[sglang.exact(flag, _FIELDS.keys(), manual="docs/flags.md")]
        if not field.about.live:
            raise ConfigError(
                f"{field.name} cannot change while the server runs; restart the server with the"
                " new value. docs/flags.md marks the options that can change."
            )
        if field.name in values:
            raise ConfigError(f"{field.name} is given twice.")
        values[field.name] = _value(field, value)
    return values


def _value(field: Field[Option], value: Any) -> Scalar:
    if value is None or value in ("none", "null"):
        return None
    if field.kind is bool:
        word = str(value).lower()
        if word not in ("true", "false"):
            raise ConfigError(f"{field.name} must be true or false, got {value!r}.")
        return word == "true"
    if isinstance(value, (bool, list, dict)):
        raise ConfigError(f"{field.name} must be a single value, got {value!r}.")
    try:
        return converter(field)(str(as_whole(value)))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{field.name}: {error}.") from None
