"""Is the doctor right on a real server? Each scene provokes one cause with the default model, the
doctor reads the log, its advice is followed, and the effect is measured against its prediction.

    python benchmarks/doctor.py [--only seq-cap,kv-full] [--seconds 45] [--name doctor]

A scene starts a server, keeps a number of users busy over HTTP for some time, and asks
``setpoint doctor`` about the log. Then the advised flag (or the advised number of users) is applied
to a new server under the same load. With --logs, the logs are kept; with --name,
JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from contenders import SetpointServer, StartError
from doctor_scenes import SCENES, Load, Scene
from machine import PACKAGES, environment, save, versions

RAMP = 0.4
"""Share of a load's time, at its beginning, that is not measured: larger pools take longer to
fill."""


@dataclass(slots=True)
class Measured:
    """What the clients saw, and what the log counted, after the load has settled."""

    gen_throughput: float
    """Tokens per second."""
    input_throughput: float
    """Prompt tokens per second of requests that got their first token."""
    ttft_s: float
    """Median."""
    itl_s: float
    """Median time between two chunks."""
    retractions_per_minute: float
    running: float
    """Mean over the decode lines."""

    def figure(self, name: str) -> float | None:
        """The figure that an effect predicts, by the doctor's name for it."""
        return {
            "output throughput": self.gen_throughput,
            "input throughput": self.input_throughput,
            "time to first token": self.ttft_s,
            "time between tokens": self.itl_s,
            "retractions per minute": self.retractions_per_minute,
            "running requests": self.running,
        }.get(name)


@dataclass(slots=True)
class Run:
    arguments: list[str]
    users: int
    measured: Measured
    report: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    scene: str
    expected: str
    before: Run
    after: Run | None = None
    figure: str | None = None
    predicted: tuple[float, float, float] | None = None
    measured: float | None = None
    why_not: str = ""
    """Why nothing was changed."""

    @property
    def is_inside(self) -> bool | None:
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted[0] <= self.measured <= self.predicted[2]


@dataclass(slots=True)
class Clients:
    """Users who ask, read the whole answer, and ask again."""

    url: str
    load: Load
    chunks_s: list[float] = field(default_factory=list)
    """When chunks arrived, in seconds since the beginning of the load, like all times here."""
    gaps_s: list[tuple[float, float]] = field(default_factory=list)
    """For each later chunk: when it arrived, and how long after the one before it."""
    firsts: list[tuple[float, float, int]] = field(default_factory=list)
    """For each first token: when it came, how long it took, and the length of the prompt."""
    num_asked: int = 0
    num_answered: int = 0

    async def work(self, users: int, seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        begin = time.perf_counter()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            tasks = [asyncio.create_task(self._user(session, begin)) for _ in range(users)]
            try:
                done, _ = await asyncio.wait(
                    tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
                )
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    async def _user(self, session: aiohttp.ClientSession, begin: float) -> None:
        while True:
            body = self.load.body(self.num_asked)
            self.num_asked += 1
            sent = last = time.perf_counter()
            async with session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    raise RuntimeError((await response.text())[:300])
                is_first = True
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    if is_first:
                        self.firsts.append((now - begin, now - sent, self.load.prompt_tokens))
                    else:
                        self.gaps_s.append((now - begin, now - last))
                    self.chunks_s.append(now - begin)
                    last, is_first = now, False
            self.num_answered += 1
            await asyncio.sleep(self.load.think_s)

    def measured(self, begin: float, end: float, log: str) -> Measured:
        """What came between two times, in seconds since the beginning.

        log: what the server wrote from the beginning to ``end``.
        """
        firsts = [first for first in self.firsts if begin < first[0] <= end]
        running = [
            float(line.split("#running-req: ")[1].split(",")[0])
            for line in log.splitlines()
            if "Decode batch" in line
        ]
        return Measured(
            sum(begin < at <= end for at in self.chunks_s) / (end - begin),
            sum(length for _, _, length in firsts) / (end - begin),
            statistics.median([took for _, took, _ in firsts] or [0.0]),
            statistics.median([gap for at, gap in self.gaps_s if begin < at <= end] or [0.0]),
            log.count("KV cache pool is full. Retract requests.") / (end / 60),
            statistics.fmean(running or [0.0]),
        )


async def play(
    scene: Scene, arguments: list[str], users: int, seconds: float, log: Path | None
) -> Run:
    """Run a scene once, and ask the doctor. log: where to keep the server's log."""
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "server.log"
        server = SetpointServer(scene.name, arguments, environment={}, stream=True)
        try:
            await server.ready()
            clients = Clients(server.url, scene.load)
            await clients.work(users, seconds)
            # As it is under load: the end of the load is in most logs that people look at.
            text = server.log()
        finally:
            server.close()
        log.write_text(text)
        command = [sys.executable, "-m", "setpoint.cli", "doctor", str(log), "--json"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode not in (0, 1):
            raise RuntimeError(f"setpoint doctor ended with {asked.returncode}: {asked.stderr}")
        return Run(
            arguments,
            users,
            clients.measured(RAMP * seconds, seconds, text),
            json.loads(asked.stdout),
        )


def advised(scene: Scene, action: Mapping[str, Any], run: Run) -> tuple[list[str], int] | str:
    """The arguments and users after the advice is followed, or why it cannot be followed here."""
    flag, value = action.get("flag"), action.get("value")
    if flag is None:
        if scene.expected != "client-bound" or not isinstance(value, int | float):
            return f"outside the server: {action.get('text', '')}"
        return run.arguments, max(int(value), run.users + 1)
    arguments = list(run.arguments)
    if value is True:
        return [*arguments, flag], run.users
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = str(value)
        return arguments, run.users
    return [*arguments, flag, str(value)], run.users


async def measure(scene: Scene, seconds: float, logs: Path | None) -> Outcome:
    def log(part: str) -> Path | None:
        return logs and logs / f"{scene.name}-{part}.log"

    before = await play(scene, list(scene.arguments), scene.users, seconds, log("before"))
    outcome = Outcome(scene.name, scene.expected, before)
    findings = before.report["findings"]
    if not findings:
        outcome.why_not = "no finding"
        return outcome
    change = advised(scene, findings[0]["action"], before)
    if isinstance(change, str):
        outcome.why_not = change
        return outcome
    outcome.after = await play(scene, *change, seconds, log("after"))
    effect = findings[0].get("effect")
    if effect:
        was = before.measured.figure(effect["figure"])
        now = outcome.after.measured.figure(effect["figure"])
        outcome.figure = effect["figure"]
        outcome.predicted = effect["low"], effect["expected"], effect["high"]
        if was and now is not None:
            outcome.measured = now / was
    return outcome


def row(outcome: Outcome) -> str:
    before, report = outcome.before, outcome.before.report
    action = report["findings"][0]["action"] if report["findings"] else {}
    advice = f"`{action['flag']} {action['value']}`" if action.get("flag") else outcome.why_not
    if action and not action.get("flag") and outcome.after is not None:
        advice = f"{outcome.after.users} users"
    cells = [
        f"{outcome.scene}: `{' '.join(before.arguments) or 'no flags'}`, {before.users} users",
        report["verdict"] + ("" if report["verdict"] == outcome.expected else " (**wrong**)"),
        advice,
        outcome.figure or "–",
        _interval(outcome.predicted),
        "–" if outcome.measured is None else f"{outcome.measured:.2f}",
        {None: "–", True: "yes", False: "no"}[outcome.is_inside],
        "–" if outcome.after is None else outcome.after.report["verdict"],
    ]
    return f"| {' | '.join(cells)} |"


def _interval(predicted: tuple[float, float, float] | None) -> str:
    return "–" if predicted is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*predicted)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="scenes by name, separated by commas")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long a load lasts")
    parser.add_argument("--logs", type=Path, help="folder to keep the logs of the servers in")
    parser.add_argument("--name", help="keep the figures in benchmarks/results/<date>-<name>.json")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> None:
    args = parse()
    chosen = [scene for scene in SCENES if not args.only or scene.name in args.only.split(",")]
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    load, outcomes = os.getloadavg()[0], []
    print(environment(*PACKAGES))
    print(
        "| scene | verdict | advice | figure | predicted factor | measured | inside | verdict"
        " afterwards |\n|---|---|---|---|---|---|---|---|"
    )
    for scene in chosen:
        try:
            outcomes.append(asyncio.run(measure(scene, args.seconds, args.logs)))
        except StartError as error:
            print(f"| {scene.name} | did not start: {error} | | | | | | |")
            continue
        print(row(outcomes[-1]), flush=True)
    if args.name:
        figures = {"seconds": args.seconds, "scenes": [asdict(each) for each in outcomes]}
        print(save(args.results, args.name, figures, packages=versions(*PACKAGES), load=load))


if __name__ == "__main__":
    main()
