"""What an engine announces is what it works on: whenever a plan executes, the frontend knows the
requests of the plans in flight, and nobody else is a suspect."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.messages import Announce, ToFrontend
from setpoint.core.plan import StepPlan
from setpoint.core.settings import PrioritySettings
from setpoint_testing.harness import Harness, Wire
from setpoint_testing.scripted import ScriptedExecutor, ScriptedStep, hashed_token

VOCAB = 17
PAGES = 24


@dataclass
class Listening(Wire):
    """A wire whose other end follows the announcements."""

    suspects: dict[int, str] = field(default_factory=dict)

    def send(self, message: ToFrontend) -> None:
        if isinstance(message, Announce):
            assert message.joined or message.left, "an announcement that says nothing"
            assert not message.joined.keys() & self.suspects.keys(), "joined twice"
            for seq_id in message.left:
                del self.suspects[seq_id]  # nobody leaves who is not there
            self.suspects.update(message.joined)
        super().send(message)


class Watched(ScriptedExecutor):
    """Compares the announcements with the plans at the moment a plan begins to execute."""

    harness: Harness
    num_checked = 0

    def submit(self, plan: StepPlan) -> ScriptedStep:
        wire, steps = self.harness.wire, self.harness.scheduler.state.inflight
        assert isinstance(wire, Listening)
        assert steps[-1].plan is plan
        assert wire.suspects == {seq.seq_id: seq.rid for step in steps for seq in step.seqs}
        self.num_checked += 1
        return super().submit(plan)


def watched(depth: int, **config: object) -> tuple[Harness, Watched, Listening]:
    executor = Watched(num_pages=PAGES, page_size=1, next_token=hashed_token(VOCAB))
    wire = Listening()
    executor.harness = Harness(
        num_pages=PAGES,
        executor=executor,
        wire=wire,
        depth=depth,
        vocab_size=VOCAB,
        max_running_requests=3,
        **config,
    )
    return executor.harness, executor, wire


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 8), st.integers(0, 12), st.integers(0, 2)),
        st.tuples(st.sampled_from(["stop", "abort"]), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 6)),
    ),
    max_size=40,
)


@given(
    actions,
    st.integers(0, 2),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.sampled_from([0, 2]),
)
def test_the_suspects_are_the_requests_of_the_plans_in_flight(
    steps: list[tuple[object, ...]], depth: int, chunk: int | None, mixed: bool, retract: int
) -> None:
    """Through retraction, preemption, chunks, aborts, and rids that are used again."""
    harness, executor, wire = watched(
        depth,
        chunked_prefill_size=chunk,
        mixed_chunk=mixed,
        test_retract_interval=retract,
        priority=PrioritySettings(default=0, threshold=0),
    )
    rids: list[str] = []
    for step in steps:
        match step:
            case ("submit", int(length), int(num_new), int(priority)):
                rids.append(f"r{len(rids)}")
                harness.submit(rids[-1], [1] * length, max_new_tokens=num_new, priority=priority)
            case ("stop" | "abort" as kind, int(number)) if rids:
                (harness.stop if kind == "stop" else harness.abort)(rids[number % len(rids)])
            case ("turn", int(times)):
                harness.turn(times)
        if depth:  # a synchronous engine has nothing in flight between two turns
            inflight = harness.scheduler.state.inflight
            assert wire.suspects.keys() == {seq.seq_id for each in inflight for seq in each.seqs}
    harness.drain()
    assert wire.suspects == {}, "nobody is suspected of the death of an idle engine"
    assert executor.num_checked == len(harness.plans)


def test_steps_of_the_same_sequences_are_announced_once() -> None:
    harness, _, wire = watched(0)
    harness.submit("a", [1, 2], max_new_tokens=6)
    harness.submit("b", [1, 3], max_new_tokens=6)
    found = []
    for _ in range(8):
        harness.loop.step()
        found += [message for message in wire.outbox if isinstance(message, Announce)]
        wire.outbox.clear()
    assert found == [Announce({0: "a", 1: "b"}, []), Announce({}, [0, 1])]
