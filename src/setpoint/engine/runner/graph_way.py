"""Steps as graphs of a device: one graph for each of a few sizes, captured at the start.

A graph of rows serves decode steps of up to so many rows, a graph of tokens other steps of up to so
many tokens. A size for which the device has too little memory is left out; its steps use the next
larger graph, or none. Whatever differs from step to step is data at fixed addresses
(``runner.step_block``): lengths, pages, where each row's tokens are. Rows that fill a step up to
the size of its graph have length 0 and no tokens, and tokens after the last row are no row's: their
K and V go to the dummy page, and nobody reads their results.

The ranks of a model capture the same sizes in the same order, and agree after each: a size has a
graph on all of them or on none, because a captured step exchanges the tokens of its size, and an
eager one those of its rows.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.graph_sizes import NO_GRAPHS
from setpoint.core.lack import Lack
from setpoint.core.limits import logits_rows
from setpoint.core.progress import report
from setpoint.engine.attention.split_attention import of_kind
from setpoint.engine.kernels.device import give_back, lack_of
from setpoint.engine.kernels.graphs import make_graphs
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import NO_ROWS, ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs, StepLogits
from setpoint.engine.runner.way import Ran

logger = logging.getLogger(__name__)

GIB = 1 << 30
DONE, FAILED, NO_MEMORY = range(3)
"""What a rank says of its capture."""


@dataclass(slots=True, frozen=True)
class Kind:
    """The graphs of one kind, in words."""

    name: str
    unit: str
    """What a size counts."""
    flag: str
    """The option for the largest size."""


DECODE = Kind("decode", "requests", "--cuda-graph-max-bs-decode")
PREFILL = Kind("prefill", "tokens", "--cuda-graph-max-bs-prefill")


@dataclass(slots=True, frozen=True)
class Captured:
    """A step of a fixed size that has been captured."""

    inputs: Inputs
    replay: Callable[[], None]
    hidden: torch.Tensor
    """[T, H]."""
    logits: StepLogits | None
    """None in graphs of tokens, few of which sample: then each step computes its own."""


class GraphWay:
    """Implements ``runner.way.CapturedWay``."""

    name = "graph"

    def __init__(self, forward_pass: ForwardPass, backends: Backends, *, with_head: bool) -> None:
        """with_head: whether the model has logits. Raises NotCapturable with the reason,
        KernelsUnavailable on a device without graphs, and OutOfMemoryError if not even the smallest
        graph has room."""
        sizes = forward_pass.graph_sizes
        if sizes == NO_GRAPHS:
            raise NotCapturable("it is switched off")
        self._pass = forward_pass
        self._backends = backends
        decodes, extends = (
            of_kind(backends.attention, is_decode=each).is_capturable for each in (True, False)
        )
        can = (sizes.rows and decodes) or (sizes.tokens and extends)
        self._agree("" if can else "its attention plans each step on the host")
        self._graphs = make_graphs(forward_pass.device)
        self.why_partly_eager = ""
        most = len(forward_pass.block.rows.slots)
        most_logits = logits_rows(forward_pass.device.type) if with_head else 0
        self._decode = self._capture_all(
            DECODE,
            [size for size in sizes.rows if size <= most and decodes],
            lambda size: self._capture(size, size, with_logits=size <= most_logits),
        )
        self._extend = self._capture_all(
            PREFILL,
            sizes.tokens if extends else (),
            # Fewer rows than tokens, because as many would be those of a decode step. A row of a
            # step that is none has several tokens, so no step has more rows than that.
            lambda size: self._capture(size, min(size - 1, most), with_logits=False),
        )
        self.num_bytes = self._graphs.num_bytes

    def takes(self, batch: ForwardBatch) -> bool:
        return self._fitting(batch) is not None

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        captured = self._fitting(batch)
        self._pass.send(batch, len(captured.inputs.slots))
        captured.replay()
        logits = captured.logits if with_logits else None
        if with_logits and logits is None:
            index = self._pass.sample_index(batch)
            logits = self._pass.answer(captured.hidden, index, self._backends)
        return Ran(self, captured.hidden, logits)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._pass.logits(hidden, self._backends)

    def _capture_all(
        self, kind: Kind, sizes: Sequence[int], capture: Callable[[int], Captured]
    ) -> list[Captured]:
        """The graphs of one kind, by size, with SGLang's lines about them
        (docs/sglang/logs.md#start-up), without those for which there is no memory."""
        if not sizes:
            return []
        began, before = time.perf_counter(), self._graphs.num_bytes
        logger.info(
            "Capture target %s CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=%.2f"
            " GB",
            kind.name,
            self._graphs.free_bytes / GIB,
        )
        captured: list[Captured] = []
        left_out: dict[int, Lack] = {}
        # From large to small, so that the small ones find the memory of the large ones free.
        for number, size in enumerate(reversed(sizes), 1):
            report(f"capturing {kind.name} steps, {number} of {len(sizes)}: {size} {kind.unit}")
            lack = self._try_capture(size, capture, captured)
            if lack is not None:
                left_out[size] = lack
        if left_out:
            self._tell_left_out(kind, left_out, captured)
        logger.info(
            "Capture target %s CUDA graph end. bs=%s, elapsed=%.2f s, mem usage=%.2f GB, avail"
            " mem=%.2f GB.",
            kind.name,
            [each.inputs.num_tokens for each in reversed(captured)],
            time.perf_counter() - began,
            (self._graphs.num_bytes - before) / GIB,
            self._graphs.free_bytes / GIB,
        )
        return captured[::-1]

    def _try_capture(
        self, size: int, capture: Callable[[int], Captured], captured: list[Captured]
    ) -> Lack | None:
        """Add a graph. Returns what was lacking if the device has no memory for it."""
        try:
            captured.append(capture(size))
        except torch.OutOfMemoryError as error:
            lack = lack_of(error, self._pass.device)
        else:
            return None
        give_back(self._pass.device)  # the exception, which holds the tensors, is gone
        return lack

    def _tell_left_out(
        self, kind: Kind, left_out: dict[int, Lack], captured: Sequence[Captured]
    ) -> None:
        """Say which sizes have no graph. Raises OutOfMemoryError if none has."""
        lack = max(left_out.values(), key=lambda lack: lack.wanted_bytes)
        advice = (
            f"Lower {kind.flag} or --cuda-graph-max-bs, or start with a --mem-fraction-static that"
            f" is {lack.less_static} lower"
        )
        if not captured:
            raise OutOfMemoryError(
                f"Capture of CUDA graphs failed: there is no memory for a single one of"
                f" {kind.name} steps: {lack.why}. {advice}, or use --disable-cuda-graph."
            )
        why = (
            f"there is no memory for graphs of {kind.name} steps with"
            f" {', '.join(map(str, left_out))} {kind.unit} ({lack.why}). {advice}"
        )
        self.why_partly_eager = "; ".join(filter(None, (self.why_partly_eager, why)))

    def _fitting(self, batch: ForwardBatch) -> Captured | None:
        """The smallest graph that the batch fits into."""
        num_rows = len(batch.slots)
        if not num_rows:
            return None
        graphs = self._decode if batch.num_tokens == num_rows else self._extend
        at = bisect.bisect_left(graphs, batch.num_tokens, key=lambda each: each.inputs.num_tokens)
        return graphs[at] if at < len(graphs) else None

    def _capture(self, num_tokens: int, num_rows: int, *, with_logits: bool) -> Captured:
        rows = self._pass.block.rows
        host = np.zeros(num_rows + 1, np.int32)
        inputs = Inputs(
            num_tokens,
            rows.slots[:num_rows],
            rows.cu_q[: num_rows + 1],
            rows.kv_lens[:num_rows],
            host,
            host[1:],
        )
        index = rows.sample_index[:num_rows]

        def launch() -> tuple[torch.Tensor, StepLogits | None]:
            hidden = self._pass.hidden(inputs, self._backends)
            logits = self._pass.answer(hidden, index, self._backends) if with_logits else None
            return hidden, logits

        # Nothing of the rows that a graph is captured with stays: these have no tokens.
        self._pass.send(NO_ROWS, num_rows)
        self._warm_up(launch)
        why_not, lacks_memory = "", False
        try:
            replay, (hidden, logits) = self._graphs.capture(launch)
        except RuntimeError as error:
            why_not = str(error).partition("\n")[0]
            lacks_memory = isinstance(error, torch.OutOfMemoryError)
        self._agree(why_not, lacks_memory=lacks_memory)
        return Captured(inputs, replay, hidden, logits)

    def _warm_up(self, launch: Callable[[], object]) -> None:
        """Run a step before it is captured. The exchanges of this run take place, and nobody waits
        while a step is captured. Raises torch.OutOfMemoryError, or MemoryError, which ends this
        process, if there are other ranks: they wait for this one, and end with it."""
        try:
            self._graphs.warm_up(launch)
        except torch.OutOfMemoryError as error:
            if self._backends.group.size == 1:
                raise
            raise MemoryError(
                f"this rank has no memory for a step that all run: {error}"
            ) from error

    def _agree(self, why_not: str, *, lacks_memory: bool = False) -> None:
        """Tell the other ranks whether this one could capture, and hear the same of them. Raises
        NotCapturable, or torch.OutOfMemoryError if a rank has no memory for a graph, on all ranks
        if one could not. why_not: why this one could not; "": it could."""
        group = self._backends.group
        own = NO_MEMORY if lacks_memory else FAILED if why_not else DONE
        outcomes = group.numbers(own, self._pass.device)
        worst = max(outcomes)
        if worst == DONE:
            return
        if why_not and group.rank:  # rank 0 tells its own reason
            logger.warning("This rank could not capture a step: %s", why_not)
        reason = why_not or f"rank {outcomes.index(worst)} could not, and its log says why"
        raise torch.OutOfMemoryError(reason) if worst == NO_MEMORY else NotCapturable(reason)
