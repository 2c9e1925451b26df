"""What one prefill pass may spend: tokens of input, of a chunk, and memory
(docs/sglang/scheduling.md#admission).

Pure arithmetic on token counts; memory is counted in pool tokens (``core.pagerows``). The pool's
free + evictable tokens are passed in at every question, because matching a prefix pins pages and
admitting one takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from setpoint.core.pagerows import CacheCosts
from setpoint.core.records import Refusal


@dataclass(slots=True)
class PrefillBudget:
    """Lives for one ``schedule()``. All amounts in tokens, those of memory in pool tokens."""

    costs: CacheCosts
    clip_max_new_tokens: int
    input_left: int
    """Of max_prefill_tokens. Where prompts are cut into chunks it ends a pass that has spent it,
    and keeps no single prompt out."""
    chunk_left: int | None
    """Of chunked_prefill_size; None = prompts are never cut."""
    requests_left: int | None
    """Of prefill_max_requests."""
    reserved: float
    """Memory that must stay free: the expected outputs of running requests, then of those admitted
    in this pass."""
    num_admitted: int = 0

    @property
    def page_size(self) -> int:
        return self.costs.page_size

    def _ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def exhausted(self, available: int) -> Refusal | None:
        """Why no further request can be looked at, if so; ``available`` = free + evictable
        tokens."""
        if available - self.reserved <= 0:
            return Refusal.NO_MEMORY
        if self.requests_left is not None and self.num_admitted >= self.requests_left:
            return Refusal.PREFILL_LIMIT
        if self.input_left <= 0:
            return Refusal.TOKEN_BUDGET
        if self.chunk_left is not None and self.chunk_left <= 0:
            return Refusal.CHUNK_BUDGET
        return None

    def judge(self, extend: int, remaining: int, available: int, *, cached: int) -> int | Refusal:
        """How many of ``extend`` uncached tokens to compute now for a candidate, or why it must
        wait.

        cached: tokens before them, whose pages it holds. remaining: outputs the candidate may still
        generate. A candidate is charged its full (clipped) output, not the share that running ones
        are: optimism is for those whose lengths are being observed.
        """
        tokens = extend + min(max(remaining, 0), self.clip_max_new_tokens) + self.page_size
        if self.costs.growth(tokens, cached) >= available - self.reserved:
            return Refusal.NO_MEMORY
        padded = self._ceil_page(extend)
        if self.chunk_left is None:
            return (
                Refusal.TOKEN_BUDGET
                if padded >= self.input_left and self.num_admitted > 0
                else extend
            )
        if padded <= self.chunk_left:
            return extend
        cut = self.chunk_left // self.page_size * self.page_size
        return cut if cut > 0 else Refusal.CHUNK_BUDGET

    def chunk(self, extend: int, available: int, *, kept: int = 0) -> int:
        """Tokens the sequence in mid-prefill gets: it goes first and ignores the memory reserve, so
        it always advances.

        available: tokens that it has pages for, or could have; kept: tokens of the chunk that are
        not for it.
        """
        limit = min(extend, available // self.page_size * self.page_size)
        if self.chunk_left is not None and self._ceil_page(limit) > self.chunk_left - kept:
            limit = self.chunk_left - kept
        return limit if limit == extend else limit // self.page_size * self.page_size

    def kept_for_shorter(self, extend: int, waiting: Iterable[int]) -> int:
        """Tokens of this chunk for those of the waiting prompts, in order, that are shorter than
        ``extend``; one page always remains.

        extend, waiting: uncached tokens of the prompt in mid-prefill, and of each one that waits.
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
        """Book a row. Its pages are taken from the pool already; ``reserve`` are the outputs that
        it, now of ``num_tokens`` tokens, may still have."""
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
    """SGLang's test for ignore_eos requests without a prefix cache: does every request reach its
    known end?

    requests: (outputs left, tokens) of the running ones and the candidate, whose prompt is already
    taken from ``available``; num_full: pool tokens that a token takes. They end in the order of
    outputs left, and each end gives back what that request occupied; when the i-th ends, those
    still alive have grown by its outputs left, and more than one token each must be free.
    """
    order = sorted(requests)
    freed = 0
    for index, (left, num_tokens) in enumerate(order):
        alive = len(order) - index
        if available + freed - num_full * left * alive <= num_full * alive:
            return False
        freed += num_full * num_tokens
    return True
