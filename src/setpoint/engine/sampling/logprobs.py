"""Logprobs of sampled tokens and of prompt tokens, in blocks of bounded size.

Output logprobs are computed after edits and temperature, before truncation; prompt logprobs are
computed from the raw logits (docs/sglang/sampling.md#logprobs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.core.limits import REPORT_BYTES
from setpoint.engine.kernels.device import to_device
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.sampling.columns import SamplingRows


@dataclass(slots=True, frozen=True)
class Logprobs:
    """Logprobs of R positions. Each width is the largest that any of the positions wants."""

    values: torch.Tensor
    """[R]."""
    ids: torch.Tensor
    """[R]: the tokens to which they belong."""
    top_values: torch.Tensor
    """[R, n]."""
    top_ids: torch.Tensor
    picked: torch.Tensor
    """[R, m]: logprobs of the tokens that each row names (padded with token 0)."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Logprobs:
        return Logprobs(
            *(
                function(t)
                for t in (self.values, self.ids, self.top_values, self.top_ids, self.picked)
            )
        )


def concatenate_logprobs(blocks: Sequence[Logprobs]) -> Logprobs:
    """The positions of all blocks, padded to the largest widths."""

    def concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
        width = max(tensor.shape[1] for tensor in tensors)
        return torch.cat(
            [torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
        )

    return Logprobs(
        values=torch.cat([block.values for block in blocks]),
        ids=torch.cat([block.ids for block in blocks]),
        top_values=concatenate([block.top_values for block in blocks]),
        top_ids=concatenate([block.top_ids for block in blocks]),
        picked=concatenate([block.picked for block in blocks]),
    )


def output_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, rows: SamplingRows, ops: Ops
) -> Logprobs:
    """Logprobs of the chosen tokens ``ids`` [S] under the edited logits [S, V], for the rows that
    want them."""
    blocks = []
    for which in in_blocks(np.flatnonzero(rows.columns["logprobs"]), logits.shape[1]):
        columns = rows.columns[which]
        index = to_device(which, logits.device)
        blocks.append(
            gather_logprobs(
                logits[index],
                ids[index],
                int(columns["num_top"].max()),
                to_device(picked_ids(rows, which), logits.device),
                ops,
                temperature=to_device(columns["temperature"], logits.device),
            )
        )
    return blocks[0] if len(blocks) == 1 else concatenate_logprobs(blocks)


def in_blocks(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """The rows, so many at a time that their fp32 logits take at most REPORT_BYTES."""
    size = rows_at_a_time(vocab_size)
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def rows_at_a_time(vocab_size: int) -> int:
    return max(1, REPORT_BYTES // (4 * vocab_size))


def picked_ids(rows: SamplingRows, which: np.ndarray) -> np.ndarray:
    """[len(which), m] int64: the token_ids_logprob of each row, padded with 0."""
    lists = [
        rows.lists[slot].picked if slot in rows.lists else np.zeros(0, np.int64)
        for slot in rows.slots[which].tolist()
    ]
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, tokens in zip(table, lists, strict=True):
        row[: len(tokens)] = tokens
    return table


def gather_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
    picked: torch.Tensor,
    ops: Ops,
    *,
    temperature: torch.Tensor | None = None,
) -> Logprobs:
    """logits [R, V], ids [R], picked [R, m] -> log softmax of logits / temperature [R] at these
    tokens and at the ``num_top`` first ones of ``Ops.top_tokens``. The latter are found before the
    division, which may make different logits equal."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        wide = wide / temperature.unsqueeze(1)
    total = ops.log_sum_exp(wide)
    top_ids = ops.top_tokens(logits, min(num_top, logits.shape[1])) if num_top else picked[:, :0]

    def at(tokens: torch.Tensor) -> torch.Tensor:
        return (wide.gather(1, tokens) - total).float()

    return Logprobs(
        values=at(ids.long().unsqueeze(1)).squeeze(1),
        ids=ids.int(),
        top_values=at(top_ids),
        top_ids=top_ids.int(),
        picked=at(picked),
    )


def prompt_logprobs(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_top: int,
    picked: np.ndarray,
    ops: Ops,
) -> Logprobs:
    """Logprobs of the prompt tokens ``ids`` [R]. hidden: [R, C] at the positions before them.
    project: computes logits from hidden states. picked: [m]."""
    wanted = to_device(picked, hidden.device)
    parts: list[Logprobs] = []
    begin, size = 0, 1
    while begin < len(ids):
        logits = project(hidden[begin : begin + size])
        parts.append(
            gather_logprobs(
                logits, ids[begin : begin + size], num_top, wanted.expand(len(logits), -1), ops
            )
        )
        begin, size = begin + size, rows_at_a_time(logits.shape[1])
    fields = ("values", "ids", "top_values", "top_ids", "picked")
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))
