"""The one table of spellings: what a user may write for an option, and which of SGLang's options
are not here yet.

Works on option names and values as text. It does not parse command lines: ``commandline`` does, and
asks here.
"""

from __future__ import annotations

import difflib
from collections.abc import Set

from setpoint.config.options import OPTION_FIELDS
from setpoint.config.sglang_known import DEFAULTS, IMPLIED, KNOWN
from setpoint.core.errors import ConfigError

ALIASES = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--expert-parallel-size": "--ep-size",
    "--ep": "--ep-size",
    "--enable-hicache": "--enable-hierarchical-cache",
    # Older guides: the name is gone from SGLang 0.5.23, where it became the decode one.
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
}
"""Other spellings of an option, supported or not."""

SUPPORTED = {field.flag: field for field in OPTION_FIELDS}
"""Options of a server and its engine, by canonical spelling. A command may have more of its own
(``commands``)."""


INSTEAD = {
    "--attention-backend": "Leave it out: the best one that runs here is taken.",
    "--disaggregation-mode": "One engine does prefill and decode here; leave it out.",
    "--dp-size": "Start several servers behind a router instead.",
    "--enable-custom-logit-processor": (
        "It would run Python code that clients send, and no client may run code in a server. Use"
        " logit_bias, or a constraint."
    ),
    "--hicache-storage-backend": "The cache is kept in memory only; leave it out.",
    "--kv-cache-dtype": "The smallest types of the KV cache here are fp8_e4m3 and fp8_e5m2.",
    "--quantization": "On a CPU, w8a8_int8 stores weights in 8 bits.",
}
"""Option -> advice for users who ask for something that SGLang has and this version does not."""

_SGLANG = {*KNOWN, *ALIASES, "--help"}


def canonical(
    spelling: str,
    supported: Set[str] = SUPPORTED.keys(),
    *,
    command: str = "'setpoint serve'",
    manual: str = "'setpoint serve --help'",
) -> str:
    """The option meant by ``spelling``: a flag in ``supported`` (those of ``command``), ``--help``,
    or one that only SGLang has.

    Accepts aliases and unambiguous prefixes. A prefix that SGLang's parser understands means what
    it means there; any other is looked for among the options that work here. Raises ConfigError for
    an option that belongs to another command, for an ambiguous prefix, and for an unknown option
    (naming the nearest ones).
    """
    spellings = {*_SGLANG, *supported}
    meant = (
        {_target(spelling)}
        if spelling in spellings
        else _completions(spelling, spellings, supported)
    )
    if not meant:
        raise ConfigError(
            f"unknown option {spelling}.{_suggestion(spelling, spellings, supported, manual)}"
        )
    if len(meant) > 1 and not meant & {*supported, "--help"}:
        raise ConfigError(
            f"{_listed(sorted(meant))} are options of SGLang; this version of Setpoint supports"
            " none of them yet."
        )
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    (flag,) = meant
    if flag in SUPPORTED and flag not in supported:
        raise ConfigError(f"{flag} belongs to 'setpoint serve'; {command} has no use for it.")
    return flag


def exact(spelling: str, flags: Set[str], *, manual: str) -> str:
    """``spelling`` if it is one of ``flags`` in full. Raises ConfigError otherwise, for an option
    that only SGLang has as ``refusal`` does; for any other name it says which were probably meant.
    """
    if spelling in flags:
        return spelling
    if spelling in KNOWN and spelling not in ALIASES:
        raise refusal(spelling, spelling)
    begun = sorted(flag for flag in flags if flag.startswith(spelling))
    meant = f" Did you mean {_listed(begun, 'or')}?" if begun else ""
    raise ConfigError(
        f"unknown option {spelling}.{meant or _suggestion(spelling, flags, flags, manual)}"
    )


def is_default(flag: str, value: str | None) -> bool:
    """Whether ``flag`` with ``value`` (None: without a value) asks SGLang for its default
    behaviour."""
    if value is None:
        return flag in IMPLIED
    default = DEFAULTS.get(flag)
    return default is not None and (
        value == default or _as_number(value) == _as_number(default) is not None
    )


def default(field: str) -> str | None:
    """SGLang's default for the option of a field name, as its command line would spell it; None if
    it is unknown."""
    flag = "--" + field.replace("_", "-")
    return "" if flag in IMPLIED else DEFAULTS.get(flag)


def refusal(flag: str, spelling: str) -> ConfigError:
    """The error for an option that only SGLang has."""
    written = "" if flag == spelling else f" (written {spelling})"
    return ConfigError(
        f"{flag}{written} is an option of SGLang that is not supported by this version of Setpoint"
        f" yet.{instead(flag)}"
    )


def instead(flag: str) -> str:
    """A sentence of advice to append when the option or its value is refused; "" if there is
    none."""
    return f" {INSTEAD[flag]}" if flag in INSTEAD else ""


def own_flag(spelling: str, flags: Set[str], *, manual: str) -> str:
    """As :func:`canonical`, for a command that starts no engine: looks only among its own
    ``flags``."""
    spellings = {*flags, "--help"}
    meant = {spelling} & spellings or {name for name in spellings if name.startswith(spelling)}
    if len(meant) > 1:
        raise ConfigError(f"{spelling} is ambiguous: it could mean {_listed(sorted(meant))}.")
    if not meant:
        raise ConfigError(
            f"unknown option {spelling}.{_suggestion(spelling, spellings, spellings, manual)}"
        )
    return meant.pop()


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _completions(prefix: str, spellings: Set[str], supported: Set[str]) -> set[str]:
    complete = [name for name in spellings if name.startswith(prefix)]
    sglang = {_target(name) for name in complete if name in _SGLANG}
    if len(sglang) == 1:
        return sglang
    everything = {_target(name) for name in complete}
    return everything & {*supported, "--help"} or everything


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _target(spelling: str) -> str:
    return ALIASES.get(spelling, spelling)


def _suggestion(spelling: str, spellings: Set[str], supported: Set[str], manual: str) -> str:
    close = difflib.get_close_matches(spelling, sorted(spellings), n=3, cutoff=0.75)
    if (
        close and close[0] in supported
    ):  # a slip in one of ours is the likely case; a refused option would be no help
        close = [name for name in close if name in supported]
    return f" Did you mean {_listed(close, 'or')}?" if close else f" See {manual}."


def _listed(names: list[str], word: str = "and") -> str:
    if len(names) > 6:
        return f"{', '.join(names[:6])} and {len(names) - 6} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
