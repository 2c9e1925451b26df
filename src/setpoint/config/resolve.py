"""Settles everything that the user left open, with the reason for every value.

Pure: user + hardware + model -> ResolvedConfig. It does not look at the machine (``hardware``
does), and does not know how large the KV pool will be: ``pool`` settles what depends on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from setpoint.config.chat_formats import NONE, OPEN
from setpoint.config.check import check_options
from setpoint.config.decisions import Book, Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.resolve_model import about_the_model, settle_model
from setpoint.config.resolve_rules import about_sglang_alone, settle_rules
from setpoint.config.resolve_steps import settle_steps
from setpoint.config.resolved import ResolvedConfig
from setpoint.config.workload import apply_profile
from setpoint.core.model import ModelSpec


def resolve(
    options: Options,
    hardware: Hardware,
    model: ModelSpec,
    *,
    given: Set[str] = frozenset(),
    found: Mapping[str, tuple[str, str]] | None = None,
    env: EnvSettings | None = None,
    drawn_seed: int = 0,
) -> ResolvedConfig:
    """Settle every option.

    given: names of the options that the user wrote (``commandline.parse``). found: option -> the
    value that the caller found where the user left it open, and the reason. drawn_seed: the seed to
    use if none is given, drawn by the caller so that this function stays pure. Raises ConfigError
    for what cannot be honoured.
    """
    check_options(options)
    env = env or EnvSettings()
    profile = apply_profile(
        options,
        hardware,
        hardware.device if options.device == "auto" else options.device,
        given=given,
    )
    options = profile.options
    book = Book(options, given, profile.reasons)
    for name, (value, why) in (found or {}).items():
        if book.get(name) == OPEN:  # the formats of a chat
            book.put(name, value, why, told=value != NONE)
        else:
            book.fill(name, value, why)
    device = settle_model(book, model, hardware, env)
    steps = settle_steps(book, hardware, device)
    settle_rules(book, device, steps.chunk)
    book.fill("random_seed", drawn_seed, "drawn at start")
    book.fill("tokenizer_path", book.get("model_path"), "the model's own")
    book.fill("served_model_name", book.get("model_path"), "the model path")
    book.fill("log_level_http", options.log_level, "as --log-level")
    notes = [*steps.decisions, *about_the_model(book, model), *about_sglang_alone(given)]
    notes += [
        Decision(name, None, words, told=True)
        for name, (words, _) in profile.reasons.items()
        if not hasattr(options, name)
    ]
    return ResolvedConfig(
        options=msgspec.structs.replace(options, **book.values),
        env=env,
        decisions=(*book.decisions(), *notes),
        fraction_given=options.mem_fraction_static is not None,
        overlap_depth=steps.overlap_depth,
        decode_after_piece=steps.decode_after_piece,
    )
