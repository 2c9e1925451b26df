"""Estimates a step's work: its floating-point operations, and the bytes of memory that it reads and
writes (--enable-mfu-metrics). The estimate is arithmetic on the model's dimensions and the counts
in the step's record; nothing is measured. Operations are counted as in SGLang (decision 0061)."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.core.model import ModelSpec, numbers_per_token
from setpoint.core.records import Record, StepDone
from setpoint.observe.figures import Figures


@dataclass(slots=True, frozen=True)
class StepWork:
    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
        )


@dataclass(slots=True, frozen=True)
class WorkModel:
    """The properties of the model that determine the work of a step."""

    spec: ModelSpec
    weights_bytes: int
    """Bytes of the weights. A step reads them once, however many tokens it has; of the experts it
    reads those that it uses."""
    experts_share: float
    """The share of ``weights_bytes`` that belongs to experts."""
    dtype_bytes: int
    """Bytes of an element of the activations."""
    kv_bytes: int
    """Bytes of a token's keys and values in all layers."""

    def of(self, step: StepDone) -> StepWork:
        spec, decoded = self.spec, step.num_decode_rows + step.num_forced
        tokens = step.num_new_tokens + decoded
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q, cached = spec.num_heads * spec.head_dim, numbers_per_token(spec.cache_parts)
        attention = sum(inputs * outputs for inputs, outputs in spec.attention_matrices.values())
        weights: float = attention + 3 * hidden * inner
        read: float = self.weights_bytes
        if mixture := spec.mixture:
            inner = mixture.num_chosen * mixture.size + mixture.shared_size
            sparse = len(mixture.layers) / spec.num_layers
            dense = (1 - sparse) * spec.intermediate_size
            weights = attention + hidden * sparse * mixture.num_experts
            weights += 3 * hidden * (sparse * inner + dense)
            read *= 1 - self.experts_share * (1 - mixture.used(tokens))
        element = self.dtype_bytes * spec.num_layers
        # A layer's input and output, q, k, v, and the output of attention.
        moved = tokens * element * (2 * hidden + spec.attention_numbers)
        attended = element * (step.num_new_tokens * (q + cached) + decoded * q)
        of_pair = 2 * spec.num_heads * (spec.head_dim + spec.value_dim)
        return StepWork(
            flops=spec.num_layers * (2 * weights * tokens + of_pair * step.num_pairs),
            read_bytes=read + moved + attended + self.kv_bytes * step.num_behind,
            write_bytes=self.kv_bytes * tokens + moved + element * tokens * 3 * inner,
        )


class WorkMeter:
    """Sums the work of all steps, and makes the text about it for the log lines."""

    def __init__(self, model: WorkModel, figures: Figures) -> None:
        """figures: it must get each record before this object does."""
        self._model = model
        self._figures = figures
        self._total = StepWork()
        self._prefill = StepWork()
        """Work of the last step that computed prompt tokens."""
        self._decodes = StepWork()
        """Work of the decode steps since the last log line about decode steps."""
        self._reported = StepWork()
        """Work of the decode steps that the last log line is about."""

    def on(self, record: Record) -> None:
        if not isinstance(record, StepDone):
            return
        work = self._model.of(record)
        self._total += work
        if record.num_prefill_rows:
            self._prefill = work
            return
        self._decodes += work
        if self._figures.decode_is_due:
            self._reported, self._decodes = self._decodes, StepWork()

    def counters(self) -> dict[str, dict[str, float]]:
        """The sums, in the form of the counters of ``EngineMetrics``."""
        return {
            "sglang:estimated_flops_per_gpu": {"": self._total.flops},
            "sglang:estimated_read_bytes_per_gpu": {"": self._total.read_bytes},
            "sglang:estimated_write_bytes_per_gpu": {"": self._total.write_bytes},
        }

    def prefill_words(self) -> str:
        """The end of the log line about a step that computed prompt tokens."""
        elapsed = self._figures.elapsed_s
        if elapsed <= 0:
            return ""
        return f", est. prefill TFLOPS/s (per GPU): {self._prefill.flops / elapsed / 1e12:.4f}"

    def decode_words(self) -> str:
        """The end of the log line about decode steps."""
        elapsed = self._figures.elapsed_s
        if elapsed <= 0:
            return ""
        return (
            f", est. decode TFLOPS/s (per GPU): {self._reported.flops / elapsed / 1e12:.4f},"
            f" est. read BW (GB/s per GPU): {self._reported.read_bytes / elapsed / 1e9:.2f},"
            f" est. write BW (GB/s per GPU): {self._reported.write_bytes / elapsed / 1e9:.2f}"
        )
