"""Where requests are, for people who watch (docs/console.md)."""

from __future__ import annotations

from setpoint.core.control import ListRequests, PauseMode, RequestList
from setpoint.core.records import AdmissionRefusal
from setpoint.scheduler.listing import MAX_LISTED
from setpoint_testing.harness import Harness
from setpoint_testing.preparers import AnyToken, ScriptedPreparer

PROMPT = [10, 11, 12]


def listing(h: Harness) -> RequestList:
    h.wire.inbox.append(ListRequests(1))
    h.turn()
    answer = h.replies[-1].answer
    assert isinstance(answer, RequestList)
    return answer


def test_each_request_is_where_it_is() -> None:
    preparer = ScriptedPreparer(
        lambda request: AnyToken(), needs=lambda request: request.rid == "g", hold=True
    )
    h = Harness(preparer=preparer, max_running_requests=1)
    assert listing(h).queue == []
    for rid in ("a", "g", "b", "c"):
        h.submit(rid, PROMPT, max_new_tokens=30)
    h.turn(2)
    found = listing(h)
    assert found.running == [h.seq_id("a")]
    assert found.preparing == [h.seq_id("g")]
    assert found.queue == [h.seq_id("b"), h.seq_id("c")]
    assert found.why == AdmissionRefusal.NO_SLOT
    assert (found.num_running, found.num_queued, found.num_preparing) == (1, 2, 1)
    h.scheduler.pause(PauseMode.RETRACT)
    found = listing(h)
    assert found.paused == PauseMode.RETRACT
    assert found.retracted == [h.seq_id("a")]
    h.scheduler.resume()
    preparer.finish(h.seq_id("g"))
    h.drain()
    assert listing(h).why is None


def test_a_prompt_in_pieces_is_named() -> None:
    h = Harness(chunked_prefill_size=4)
    h.submit("a", list(range(10, 20)), max_new_tokens=2)
    h.turn()
    assert listing(h).prefilling == h.seq_id("a")
    h.drain()
    assert listing(h).prefilling is None


def test_a_long_queue_is_counted_and_not_listed() -> None:
    h = Harness(max_running_requests=1)
    for number in range(MAX_LISTED + 20):
        h.submit(f"r{number}", PROMPT, max_new_tokens=2)
    h.turn()
    found = listing(h)
    assert found.num_queued == MAX_LISTED + 19
    assert len(found.queue) == MAX_LISTED


def test_tokens_are_counted_as_they_are_made() -> None:
    """Most tokens of a request that does not stream are sent long after they were made."""
    h = Harness(max_running_requests=1)
    for rid in ("a", "b"):
        h.submit(rid, PROMPT, max_new_tokens=30, stream=False)
    h.turn(7)
    assert listing(h).outputs == {h.seq_id("a"): 7}
    assert len(h.outcomes["a"].ids) == 1
    h.scheduler.pause(PauseMode.RETRACT)
    assert listing(h).outputs == {h.seq_id("a"): 8}
