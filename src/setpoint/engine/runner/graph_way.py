"""Steps as graphs of a device: one graph for each of a few sizes, captured at the start.

A graph of rows serves decode steps of up to so many rows, a graph of tokens other steps of up to so
many tokens. Whatever differs from step to step is data at fixed addresses (``runner.step_block``):
lengths, pages, where each row's tokens are. Rows that fill a step up to the size of its graph have
length 0 and no tokens, and tokens after the last row are no row's: their K and V go to the dummy
page, and nobody reads their results.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.core.limits import LOGITS_ROWS
from setpoint.engine.kernels.graphs import make_graphs
from setpoint.engine.kernels.program import NotCapturable
from setpoint.engine.layers.context import Backends
from setpoint.engine.runner.batch import NO_ROWS, ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass, Inputs, StepLogits
from setpoint.engine.runner.way import Ran


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
    why_eager_head = ""

    def __init__(self, forward_pass: ForwardPass, backends: Backends, *, with_head: bool) -> None:
        """with_head: whether the model has logits. Raises NotCapturable with the reason, and
        KernelsUnavailable on a device without graphs."""
        if not backends.attention.is_capturable:
            raise NotCapturable("its attention plans each step on the host")
        self._pass = forward_pass
        self._backends = backends
        self._graphs = make_graphs(forward_pass.device)
        sizes = forward_pass.graph_sizes
        most = len(forward_pass.block.rows.slots)
        # From large to small, so that the small ones find the memory of the large ones free.
        self._decode = [
            self._capture(size, size, with_logits=with_head and size <= LOGITS_ROWS)
            for size in sorted(sizes.rows, reverse=True)
            if size <= most
        ][::-1]
        self._extend = [
            self._capture(size, min(size, most), with_logits=False)
            for size in sorted(sizes.tokens, reverse=True)
        ][::-1]
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
        try:
            replay, (hidden, logits) = self._graphs.capture(launch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCapturable(str(error).partition("\n")[0]) from error
        return Captured(inputs, replay, hidden, logits)
