"""The sampling parameters of every slot as one structured array, and the input of a sampling call.

The array is on the host, which knows these numbers without waiting for the device (a slot's length
grows by one per sampled token, whichever token it is) and decides from them which parts of the
sampler run at all. Only token ids are on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.plan import Admit
from setpoint.core.request import Ids
from setpoint.core.sampling import GREEDY_TEMPERATURE, TOP_K_ALL, SamplingParams
from setpoint.engine.kernels.device_sampling import DeviceRows

Columns = npt.NDArray[np.void]
"""Rows of SLOT_DTYPE."""

SLOT_DTYPE = np.dtype(
    [
        ("length", np.int32),  # known tokens, prompt + outputs; also the next token's position
        ("num_prompt", np.int32),
        ("seed", np.int64),
        ("temperature", np.float32),  # 1 if the row is greedy because of its temperature
        ("top_k", np.int32),  # TOP_K_ALL = no limit
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("repetition", np.float32),
        ("min_new", np.int32),
        ("logprob_start", np.int32),  # first prompt position whose logprob is wanted, -1: none
        ("num_top", np.int32),  # top_logprobs_num
        ("greedy", np.bool_),
        ("truncated", np.bool_),  # top-k or top-p applies, so probabilities must be sorted
        ("penalised", np.bool_),
        ("biased", np.bool_),
        ("logprobs", np.bool_),
        ("facts", np.bool_),  # token_facts
    ],
    align=True,  # so that torch accepts a column as a strided view
)
NUM_WORDS = SLOT_DTYPE.itemsize // 4
"""Numbers of a row as int32, which is how a device gets it. The kernels that sample know where each
field is."""


@dataclass(slots=True, frozen=True)
class TokenLists:
    """A slot's parameters that are lists; most slots have none."""

    stop_ids: npt.NDArray[np.int64]
    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    picked: npt.NDArray[np.int64]
    """token_ids_logprob."""
    facts: tuple[str, ...]
    """token_facts."""


def slot_values(admit: Admit) -> tuple[float | int | bool, ...]:
    """The SLOT_DTYPE row of an admission."""
    s, logprobs = admit.sampling, admit.options.logprobs
    top_k = TOP_K_ALL if s.top_k < 0 else min(s.top_k, TOP_K_ALL)
    return (
        len(admit.ids),
        admit.num_prompt,
        admit.seed,
        1.0 if s.temperature < GREEDY_TEMPERATURE else s.temperature,
        top_k,
        s.top_p,
        s.min_p,
        s.frequency_penalty,
        s.presence_penalty,
        s.repetition_penalty,
        s.min_new_tokens if admit.stop_ids else 0,
        max(admit.logprob_start, 1) if logprobs is not None and admit.logprob_start >= 0 else -1,
        0 if logprobs is None else logprobs.top,
        s.is_greedy,
        top_k < TOP_K_ALL or s.top_p < 1,
        s.has_penalties,
        bool(s.logit_bias),
        logprobs is not None,
        bool(admit.options.token_facts),
    )


def with_default_sampling(admit: Admit) -> Admit:
    """The same tokens in the same slot, continued greedily, without logprobs or token facts. It can
    be computed whatever the request's own parameters are."""
    return replace(
        admit,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_ids=(),
        options=admit.options.without_reports(),
        logprob_start=-1,
    )


def wants_best(admit: Admit) -> bool:
    """Whether every token of the admission is the best one of its unchanged logits, and nothing
    else is reported about it."""
    s, options = admit.sampling, admit.options
    has_minimum = s.min_new_tokens > 0 and admit.stop_ids
    has_reports = options.logprobs is not None or options.token_facts
    return s.is_greedy and not (s.has_penalties or has_minimum or s.logit_bias or has_reports)


def token_lists(admit: Admit) -> TokenLists | None:
    """The admission's lists; None if it has none."""
    bias, picked = admit.sampling.logit_bias, admit.options.picked_ids
    facts = admit.options.token_facts
    if not (admit.stop_ids or bias or picked or facts):
        return None
    return TokenLists(
        np.array(admit.stop_ids, np.int64),
        np.array([token for token, _ in bias], np.int64),
        np.array([value for _, value in bias], np.float32),
        np.array(picked, np.int64),
        facts,
    )


def is_held(columns: Columns) -> npt.NDArray[np.bool_]:
    """[S]: True for rows that are below their minimum length, and must not choose their stop ids.
    ``min_new`` is 0 for rows without any."""
    held: npt.NDArray[np.bool_] = columns["length"] - columns["num_prompt"] < columns["min_new"]
    return held


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """The S sampling rows of a step."""

    columns: Columns
    """[S]: parameters before this sampling."""
    slots: Ids
    """[S]."""
    history: torch.Tensor
    """[num_slots, context + 1] int32 on the device: the known token ids of every slot. Entries past
    a slot's length are undefined."""
    lists: dict[int, TokenLists] = field(default_factory=dict)
    """Slot -> its lists."""
    on_device: DeviceRows | None = None
    """What a device with kernels that sample knows of these rows; None on others."""

    def facts_of(self, slot: int) -> tuple[str, ...]:
        return self.lists[slot].facts if slot in self.lists else ()
