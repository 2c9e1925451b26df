"""A real engine dies and another one takes its place under the same service: a request is the same
in both, and in an Engine of the same seed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from setpoint import Engine
from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.progress import report
from setpoint.core.request import Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.service import Service
from setpoint.launch.parent import configuration
from setpoint.launch.parent.engine import launch_engine
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.served_model import MachineShare, ServedModel
from setpoint.observe.progress_display import Display
from setpoint.offline.program_calls import Calls
from setpoint_testing.server_process import wait_until

PROMPTS = ["Once upon a time", "a"]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "n": 2, "max_new_tokens": 12, "ignore_eos": True}


async def outputs(service: Service, requests: list[Request]) -> list[list[int]]:
    with service.answering.jobs.make(requests, received={}) as job:
        return [output.output_ids for output in await job.wait()]


@pytest.mark.full
def test_a_request_is_the_same_on_the_next_engine(tiny_model: Path) -> None:
    options = Options.of(
        model_path=str(tiny_model), dtype="float32", random_seed=7, log_level="warning"
    )
    given = frozenset({"model_path", "dtype", "random_seed", "log_level"})

    def start() -> Any:
        return launch_engine(options, EnvSettings(), given=given, phases=Phases(), display=None)

    async def scenario() -> list[str]:
        with start() as first:
            async with EngineSession(first, Phases()) as session:
                service = await session.service()
                answers = await Calls(service.answering).generate(PROMPTS, SAMPLED, {})
                requests = service.answering.intake.requests(
                    await service.answering.intake.encode("Four"),
                    SamplingParams(n=4, temperature=1.0, max_new_tokens=20, ignore_eos=True),
                    RequestOptions(),
                )
                before = await outputs(service, requests)
                assert len({*map(tuple, before)}) == 4, "four samples"
                psutil.Process(first.processes[0].pid).kill()
                assert await outputs(service, requests) == before
                assert await service.health.is_healthy()
                (state,) = (await service.info.now())["internal_states"]
                assert (state["num_running"], state["num_queued"]) == (0, 0)
                assert service.events.book.num_sequences == 12
                return [each["text"] for each in answers]

    texts = asyncio.run(scenario())
    with Engine(str(tiny_model), dtype="float32", random_seed=7) as engine:
        assert [each["text"] for each in engine.generate(PROMPTS, SAMPLED)] == texts
        assert [each["text"] for each in engine.generate(PROMPTS, SAMPLED)] != texts


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("before", "says"),
    [
        (None, "Loading /"),
        ((), "Model m: starting its engine …"),
        (("b",), "Model m: waits until b has been loaded once …"),
        (("b", "c"), "Model m: waits until b and c have been loaded once …"),
    ],
)
def test_the_progress_of_a_start_is_what_is_done_now(
    tiny_model: Path,
    tmp_path: Path,
    before: tuple[str, ...] | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: it stayed the last step of the configuration, also while other models were
    loaded; and the model that is loaded first was said to wait for others."""
    settle = configuration.settle

    def slow_settle(*arguments: Any) -> ServedModel:
        report("converting, 3 of 3 files")
        return settle(*arguments)

    monkeypatch.setattr(configuration, "settle", slow_settle)
    options = Options.of(model_path=str(tiny_model), dtype="float32", served_model_name="m")
    given = frozenset({"model_path", "dtype", "served_model_name"})
    shown: list[str] = []
    with launch_engine(
        options,
        EnvSettings(),
        given=given,
        phases=Phases(),
        display=Display(shown.append, 0.01),
        share=None if before is None else MachineShare(1, str(tmp_path), before),
    ) as launched:
        shown.clear()
        wait_until(lambda: len(shown) > 1)
        assert "converting" not in shown[-1]
        assert shown[-1].startswith(says)
        launched.start_first(0)
        shown.clear()
        wait_until(lambda: len(shown) > 1)
        assert "waits" not in shown[-1]
