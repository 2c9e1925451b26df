"""The slot table on its own: tokens that a step brings are appended, any number per slot."""

from __future__ import annotations

import numpy as np
import torch

from setpoint.core.plan import Admit
from setpoint.core.request import Ids
from setpoint.core.result import one_each
from setpoint.core.sampling import SamplingParams
from setpoint.engine.kernels.device import SharedTensor
from setpoint.engine.runner.rows import SlotTable

PROMPTS = {0: [5, 6, 7], 3: [8], 2: [9, 10]}


def table() -> SlotTable:
    slots = SlotTable(context_len=12, page_size=1, max_slots=4, device=torch.device("cpu"))
    slots.admit(
        [
            Admit(slot, slot, np.array(ids, np.int32), len(ids), SamplingParams(), 0)
            for slot, ids in PROMPTS.items()
        ]
    )
    return slots


def known(slots: SlotTable, slot: int) -> list[int]:
    length = int(slots.columns["length"][slot])
    return slots.ids.tensor[slot, :length].tolist()


def ids_of(*slots: int) -> Ids:
    return np.array(slots, np.int32)


def test_one_token_each() -> None:
    slots = table()
    slots.append(ids_of(2, 0), SharedTensor(torch.tensor([20, 21])), one_each(2))
    assert known(slots, 2) == [9, 10, 20]
    assert known(slots, 0) == [5, 6, 7, 21]
    assert known(slots, 3) == [8]


def test_any_number_of_tokens_each() -> None:
    slots = table()
    tokens = SharedTensor(
        torch.tensor([20, 21, 22, 30, -1, 99, 99])
    )  # what lies behind is not ours
    slots.append(ids_of(3, 0, 2), tokens, ids_of(0, 3, 3, 5))
    assert known(slots, 3) == [8, 20, 21, 22]
    assert known(slots, 0) == [5, 6, 7]
    assert known(slots, 2) == [9, 10, 30, 0]  # a failed token is 0
    slots.append(ids_of(0, 3), SharedTensor(torch.tensor([40, 41, 42])), ids_of(0, 1, 3))
    assert known(slots, 0) == [5, 6, 7, 40]
    assert known(slots, 3) == [8, 20, 21, 22, 41, 42]


def test_no_token_at_all() -> None:
    slots = table()
    slots.append(ids_of(3, 0), SharedTensor(torch.zeros(0, dtype=torch.int64)), ids_of(0, 0, 0))
    assert known(slots, 3) == [8]
