"""The budget of one prefill pass: input tokens, chunk tokens and memory
(docs/sglang/scheduling.md#admission).

Pure arithmetic on token counts; memory is counted in pool tokens (``core.pagerows``). Every call is
given the pool's free + evictable tokens, because matching a prefix locks pages and admitting a
sequence takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from setpoint.core.pagerows import CacheCosts
from setpoint.core.records import AdmissionRefusal


@dataclass(slots=True)
class PrefillBudget:
    """What one ``schedule()`` may still spend. Amounts are in tokens, memory in pool tokens."""

    costs: CacheCosts
    clip_max_new_tokens: int
    input_left: int
    """What is left of max_prefill_tokens. With chunks, the pass ends when it is spent, but a prompt
    longer than it is still admitted."""
    chunk_left: int | None
    """What is left of chunked_prefill_size; None = prompts are not divided into chunks."""
    requests_left: int | None
    """What is left of prefill_max_requests; None = no limit."""
    reserved: float
    """Memory that must stay free for the expected outputs of running requests and of those admitted
    in this pass."""
    num_admitted: int = 0

    @property
    def page_size(self) -> int:
        return self.costs.page_size

    def _ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def exhausted(self, available: int) -> AdmissionRefusal | None:
        """The reason why no further request can be considered, or None. available: free + evictable
        pool tokens."""
        if available - self.reserved <= 0:
            return AdmissionRefusal.NO_MEMORY
        if self.requests_left is not None and self.num_admitted >= self.requests_left:
            return AdmissionRefusal.PREFILL_LIMIT
        if self.input_left <= 0:
            return AdmissionRefusal.TOKEN_BUDGET
        if self.chunk_left is not None and self.chunk_left <= 0:
            return AdmissionRefusal.CHUNK_BUDGET
        return None

    def judge(
        self, extend: int, remaining: int, available: int, *, cached: int
    ) -> int | AdmissionRefusal:
        """The number of a candidate's ``extend`` uncached tokens to compute now, or the reason why
        it must wait.

        cached: tokens before them, whose pages it holds. remaining: outputs the candidate may still
        generate. A candidate is charged its full (clipped) output, not the expected share that
        running requests are charged: the ratio is estimated from requests that are already running.
        """
        tokens = extend + min(max(remaining, 0), self.clip_max_new_tokens) + self.page_size
        if self.costs.growth(tokens, cached) >= available - self.reserved:
            return AdmissionRefusal.NO_MEMORY
        padded = self._ceil_page(extend)
        if self.chunk_left is None:
            return (
                AdmissionRefusal.TOKEN_BUDGET
                if padded >= self.input_left and self.num_admitted > 0
                else extend
            )
        if padded <= self.chunk_left:
            return extend
        cut = self.chunk_left // self.page_size * self.page_size
        return cut if cut > 0 else AdmissionRefusal.CHUNK_BUDGET

    def chunk(self, extend: int, available: int, *, kept: int = 0) -> int:
        """The number of tokens that the sequence in mid-prefill gets. It goes first and ignores the
        memory reserve, so it always advances.

        extend: uncached tokens that it has left. available: tokens for which it has pages or could
        get them. kept: tokens of the chunk that are kept for other prompts.
        """
        limit = min(extend, available // self.page_size * self.page_size)
        if self.chunk_left is not None and self._ceil_page(limit) > self.chunk_left - kept:
            limit = self.chunk_left - kept
        return limit if limit == extend else limit // self.page_size * self.page_size

    def kept_for_shorter(self, extend: int, waiting: Iterable[int]) -> int:
        """The number of tokens of this chunk to keep for waiting prompts that are shorter than
        ``extend``. The count ends at the first prompt that is not; one page always remains for the
        prompt in mid-prefill.

        extend: uncached tokens of the prompt in mid-prefill. waiting: those of each waiting prompt,
        in order.
        """
        kept = 0
        for num_uncached in waiting:
            padded = self._ceil_page(num_uncached)
            if (
                self.chunk_left is None
                or num_uncached >= extend
                or kept + padded > self.chunk_left - self.page_size
            ):
                break
            kept += padded
        return kept

    def charge(self, computed: int, *, reserve: int, num_tokens: int) -> None:
        """Charge a row of ``computed`` tokens whose pages are already taken from the pool. reserve:
        the outputs to reserve for its sequence, which now has ``num_tokens`` tokens."""
        padded = self._ceil_page(computed)
        self.input_left -= padded
        if self.chunk_left is not None:
            self.chunk_left -= padded
        if reserve > 0:
            more = self.page_size + min(reserve, self.clip_max_new_tokens)
            self.reserved += self.costs.growth(more, num_tokens, span=1)


def fits_until_finish(
    requests: Iterable[tuple[int, int]], available: float, *, num_full: int = 1
) -> bool:
    """Whether every request reaches its known end: SGLang's test for ignore_eos requests without a
    prefix cache.

    requests: (outputs left, tokens) of the running ones and the candidate, whose prompt is already
    taken from ``available``; num_full: pool tokens that a token takes. Requests end in the order of
    outputs left, and each end frees what that request occupied. When the i-th ends, those still
    running have grown by its outputs left, and more than one token each must be free.
    """
    order = sorted(requests)
    freed = 0
    for index, (left, num_tokens) in enumerate(order):
        alive = len(order) - index
        if available + freed - num_full * left * alive <= num_full * alive:
            return False
        freed += num_full * num_tokens
    return True
