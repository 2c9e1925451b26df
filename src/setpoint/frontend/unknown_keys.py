"""Keys of a body that its route does not know. SGLang ignores them silently; here the client gets a
warning or a refusal. Works on a body as it was received and the struct decoded from it. Each key is
also logged once.

An empty value (null, "", [], {}) says nothing. False and 0 say something: the key may mean what is
done otherwise.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.sampling import SamplingParams

logger = logging.getLogger(__name__)

_OFF_HERE = frozenset(
    (
        "echo",
        "enable_response_messages",
        "include_stop_str_in_output",
        "is_cross_encoder_request",
        "return_bytes",
        "return_cached_tokens_details",
        "return_entropy",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
        "return_indexer_topk",
        "return_input_ids_in_sglext",
        "return_meta_info",
        "return_mm_kwargs",
        "return_output_ids_in_sglext",
        "return_pooled_hidden_states",
        "return_prompt_text",
        "return_routed_experts",
        "return_spec_tokens_details",
        "return_token_logprobs",
        "return_token_offsets",
        "return_weight_versions",
        "use_audio_in_video",
        "use_beam_search",
        "watermarking",
    )
)
"""Keys of SGLang's and vLLM's bodies that switch on what no route here does, so that false is what
happens."""

MAX_TOLD = 8
"""How many keys of one body are named to its client; the others are counted."""
_SHOWN_CHARS = 64
_MAX_LOGGED = 256
_logged: set[tuple[str, str]] = set()


def unknown_keys(
    body: dict[str, Any],
    parsed: msgspec.Struct,
    *,
    route: str,
    unsupported: Iterable[str] = (),
    refuse: bool = False,
) -> list[str]:
    """A sentence for each key that is unknown and says something. parsed: the struct decoded
    from ``body``. refuse: raise RequestError (400) with these sentences instead.
    """
    unknown = list(_unknown(body, parsed, set(unsupported)))
    if not unknown:
        return []
    meant, fate = _names(type(parsed)), "" if refuse else " and was ignored"
    sentences = [
        f"The key '{excerpt(path, _SHOWN_CHARS)}' is unknown{fate}{_hint(path, meant)}"
        for path in unknown[:MAX_TOLD]
    ]
    if len(unknown) > MAX_TOLD:
        sentences.append(f"{len(unknown) - MAX_TOLD} more keys are unknown.")
    if refuse:
        raise RequestError(" ".join(sentences))
    for path in unknown[:MAX_TOLD]:
        _log_once(route, path)
    return sentences


def _unknown(
    body: dict[str, Any], parsed: msgspec.Struct, unsupported: set[str], inside: str = ""
) -> Iterator[str]:
    """Paths of unknown keys, including those in nested structs."""
    known = parsed.__struct_fields__
    silent = unsupported.union(known)
    for key, value in body.items():
        is_off = value is False and key in _OFF_HERE
        if key not in silent and not is_off and not _is_empty(value):
            yield inside + key
    for name in known:
        value = getattr(parsed, name)
        if isinstance(value, msgspec.Struct) and isinstance(body.get(name), dict):
            yield from _unknown(body[name], value, set(), f"{inside}{name}.")


def _is_empty(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value == "" or value == {}


def _names(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Keys that an unknown one may be a misspelling of: name -> its path from the top of the
    body."""
    names: dict[str, str] = {}
    if "sampling_params" in kind.__struct_fields__:
        names |= {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}
    for field in msgspec.structs.fields(kind):
        for nested in getattr(field.type, "__args__", (field.type,)):
            if isinstance(nested, type) and issubclass(nested, msgspec.Struct):
                names |= {name: f"{field.name}.{name}" for name in nested.__struct_fields__}
    return names | {name: name for name in kind.__struct_fields__}


def _hint(path: str, meant: dict[str, str]) -> str:
    key = path.rpartition(".")[2][:_SHOWN_CHARS]
    near = difflib.get_close_matches(key, meant, n=1, cutoff=0.7)
    return f"; did you mean '{meant[near[0]]}'?" if near else "."


def _log_once(route: str, path: str) -> None:
    if (route, path) not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add((route, path))
        logger.warning(
            "Ignored the unknown key '%s' of %s (logged once per key).",
            excerpt(path, _SHOWN_CHARS),
            route,
        )
