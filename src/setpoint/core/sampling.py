"""A request's sampling parameters: the validated form of SGLang's ``sampling_params``.

Works on numbers and strings. This module does not know the vocabulary (the frontend checks token
ids against it) nor how sampling is computed (``engine/sampling``).
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from setpoint.core.bounds import (
    FLOAT32_MAX,
    FLOAT32_MIN,
    INT32_MAX,
    INT64_MAX,
    AnyTokenId,
    Count,
    Int64,
    TokenId,
    convert_field,
)
from setpoint.core.constraint import KINDS, Constraint, constraint_text
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.wording import kind_of

TOP_K_ALL = 1 << 30
"""The value of ``top_k`` that means the whole vocabulary (SGLang's value for -1)."""

GREEDY_TEMPERATURE = 1e-6
"""A temperature below this means greedy decoding (SGLang's ``_SAMPLING_EPS``)."""

MAX_STOPS = 32
"""Most stop strings, stop expressions, and stop token ids, that a request may carry (SGLang
0.5.23)."""

MAX_STOP_REGEX_BYTES = 256
"""Longest stop expression (SGLang 0.5.23)."""

NOT_YET = ("custom_params", "beam_width", "watermark")
"""Keys of SGLang that this engine does not support yet. They are refused by name, never ignored."""

MAX_N = 4096
"""Most answers to one prompt that a request may ask for."""

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Scale = Annotated[float, Meta(ge=1e-20, le=2)]
Bias = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Bounds of a logit bias. A logit divided by a Scale, plus a Bias, divided by the smallest
temperature that is not greedy, stays within float32."""


class _Meta(msgspec.StructMeta):
    """Adds to the error for an unknown keyword the keyword that was probably meant; msgspec's error
    names only the unknown one."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        for key in given:
            if key not in cls.__struct_fields__:
                raise TypeError(unknown_parameter(key))
        return super().__call__(*args, **given)


class SamplingParams(
    msgspec.Struct, metaclass=_Meta, frozen=True, kw_only=True, omit_defaults=True
):
    """One request's sampling parameters: immutable, and checked by every way of making them.

    ``stop`` and ``stop_token_ids`` may be given as one value or a list, ``logit_bias`` as a dict.
    Raises RequestError (400) for a wrong type or a value out of range.
    """

    max_new_tokens: Count | None = 128
    """Most output tokens; None: as many as the context allows."""
    min_new_tokens: Count = 0
    """EOS and stop ids are masked until this many outputs exist."""
    temperature: Annotated[float, Meta(ge=0, le=FLOAT32_MAX)] = 1.0
    top_p: Annotated[float, Meta(ge=FLOAT32_MIN, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] = -1
    """-1, or a number larger than the vocabulary, means the whole vocabulary."""
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Scale = 1.0
    stop: tuple[str, ...] = ()
    """Stop strings, which may contain special tokens. The frontend looks for them; the engine never
    sees text."""
    stop_regex: tuple[str, ...] = ()
    """Regular expressions that end the answer where one first matches, like a stop string."""
    stop_token_ids: tuple[AnyTokenId, ...] = ()
    """The frontend leaves out ids that the vocabulary does not contain."""
    ignore_eos: bool = False
    """True: the sequence continues after EOS and stop_token_ids. Stop strings still end it, as in
    SGLang."""
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    logit_bias: tuple[tuple[TokenId, Bias], ...] = ()
    """(token id, additive bias) pairs."""
    sampling_seed: Int64 | None = None
    """Seed of the counter-based generator; None: the frontend draws one (see Request.seed)."""
    stream_interval: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Tokens between two chunks of a stream; None: the server's ``--stream-interval``."""
    json_schema: str | None = None
    """JSON schema that the output must satisfy; "$$ANY$$": any JSON. May be given as an object."""
    regex: str | None = None
    """Regular expression that the whole output must match."""
    ebnf: str | None = None
    """Context-free grammar of the output."""
    structural_tag: str | None = None
    """Text with constrained parts, as JSON. May be given as an object."""

    def __post_init__(self) -> None:
        for field in _FIELDS:
            value = getattr(self, field.name)
            if value is not field.default:
                msgspec.structs.force_setattr(self, field.name, _field_value(field, value))
        self._check_ranges()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def constraint(self) -> Constraint | None:
        """The one constraint on the output, if there is one."""
        for kind in KINDS:
            text: str | None = getattr(self, kind)
            if text is not None:
                return Constraint(kind, text)
        return None

    @property
    def has_text_stops(self) -> bool:
        """Whether only the frontend, which sees text, can tell where the answer ends."""
        return bool(self.stop or self.stop_regex)

    @property
    def has_penalties(self) -> bool:
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )

    @classmethod
    def parse(cls, raw: dict[str, Any] | None) -> SamplingParams:
        """Make SamplingParams from a client's ``sampling_params`` object.

        Raises RequestError (400) for an unknown key, a key not supported yet, a wrong type or a
        value out of range.
        """
        if raw is None:
            return cls()
        if not isinstance(raw, dict):
            raise RequestError(f"sampling_params must be an object, got {kind_of(raw)}.")
        given = {
            key: value for key, value in raw.items() if value is not None or key == "max_new_tokens"
        }
        for key in given:
            if key in NOT_YET:
                raise RequestError(f"sampling_params.{key} is not supported by this server yet.")
            if key not in cls.__struct_fields__:
                raise RequestError(unknown_parameter(key))
        return cls(**given)

    def _check_ranges(self) -> None:
        """Check SGLang's ranges where a field's own type cannot declare them
        (docs/sglang/sampling.md#parameters)."""
        limit = INT32_MAX if self.max_new_tokens is None else self.max_new_tokens
        for holds, message in (
            (self.top_k != 0, "top_k must be -1 (disable), or at least 1, got 0."),
            (
                self.min_new_tokens <= limit,
                f"min_new_tokens must be in [0, max_new_tokens], got {self.min_new_tokens}.",
            ),
            (
                len(self.stop) <= MAX_STOPS,
                f"At most {MAX_STOPS} stop strings are allowed, got {len(self.stop)}.",
            ),
            (
                len(self.stop_token_ids) <= MAX_STOPS,
                f"At most {MAX_STOPS} stop token ids are allowed, got {len(self.stop_token_ids)}.",
            ),
            ("" not in self.stop, "A stop string must not be empty."),
            (
                len(self.stop_regex) <= MAX_STOPS,
                f"stop_regex may have at most {MAX_STOPS} expressions, got {len(self.stop_regex)}.",
            ),
            (
                all(
                    len(each.encode(errors="replace")) <= MAX_STOP_REGEX_BYTES
                    for each in self.stop_regex
                ),
                f"An expression of stop_regex may have at most {MAX_STOP_REGEX_BYTES} bytes.",
            ),
            (
                sum(getattr(self, kind) is not None for kind in KINDS) <= 1,
                "Only one of json_schema, regex, ebnf, or structural_tag can be set.",
            ),
        ):
            if not holds:
                raise RequestError(message)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError (400) if a token id with a bias is outside ``[0, vocab_size)``."""
        for token, _ in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(out_of_vocabulary("logit_bias", token, vocab_size))


def out_of_vocabulary(name: str, token: int, vocab_size: int) -> str:
    """The error message for a token id of the field ``name`` that is outside the vocabulary."""
    return (
        f"{name} has the out-of-vocabulary token id {token}; valid ids are 0 to {vocab_size - 1}."
    )


def unknown_parameter(key: str) -> str:
    """The error message for an unknown key, with the key that was probably meant: one of similar
    spelling, or one that contains it."""
    names = SamplingParams.__struct_fields__
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.7) or [
        name for name in names if key in name
    ]
    return f"Unknown sampling parameter {key!r}." + (
        f" Did you mean {' or '.join(close)}?" if close else ""
    )


_FIELDS = msgspec.structs.fields(SamplingParams)


def _field_value(field: msgspec.structs.FieldInfo, value: Any) -> Any:
    """``value`` converted to the field's type from the looser forms that clients write. For most
    fields None means that the value was not given."""
    if value is None and field.name != "max_new_tokens":
        return field.default
    if field.name in KINDS:
        return constraint_text(field.name, value)
    if (
        field.name in ("stop", "stop_regex", "stop_token_ids")
        and isinstance(value, str | int | float)
        and not isinstance(value, bool)
    ):
        value = (value,)
    if field.name == "logit_bias" and not isinstance(value, tuple):
        if not isinstance(value, dict):
            raise RequestError(
                f"logit_bias must be an object that maps token ids to numbers, got"
                f" {kind_of(value)}."
            )
        value = tuple(dict(_bias_pair(*pair) for pair in value.items()).items())
    return convert_field(value, field.type, field.name)


def _bias_pair(key: Any, value: Any) -> tuple[int, float]:
    try:
        token = int(key)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(
            f"logit_bias maps token ids to numbers; {excerpt(repr(key), 40)} is not a token id."
        ) from None
    return convert_field(token, TokenId, "A token id of logit_bias"), convert_field(
        value, Bias, f"logit_bias of token {token}"
    )
