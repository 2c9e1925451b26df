"""GGUF files as people download them: Setpoint, with the bits of bf16 and with `blocks_int8`,
beside llama.cpp and ik_llama.cpp on the same files, in one run.

    python benchmarks/peers/install.py llama.cpp ik_llama.cpp
    python benchmarks/gguf_shapes.py llama-3.2-1b qwen3-1.7b gemma-3-1b two-layers
    python benchmarks/ggufs.py --name ggufs  # six files; --help says what can be left out
    python benchmarks/ggufs.py --kinds --name kinds  # one file of each kind of blocks
    python benchmarks/ggufs.py --quick --files llama-3.2-1b-Q4_0  # does everything work?

Parts (--only):

answers  the greedy answers to four prompts, and how many letters of each begin as Setpoint's
W1       one stream, W2 64 streams, W4 long prompts, over HTTP
memory   PSS of all processes of a server with a KV pool of 1,024 tokens that one prompt has filled,
         less the pool, beside the size of the file
starts   seconds until a server is ready: with the file in the page cache (warm), with nothing of
         it there (cold), and Setpoint's first start, which converts the file (first). Programs and
         libraries are in the page cache in all cases.
batches  one prompt of 512 tokens and 128 generated tokens without a server: llama-bench, and
         `setpoint bench one-batch`

A turn is a fresh process, alone on the machine. All have one turn in each repetition, in reverse
order in every other one. ik_llama.cpp has fewer slots than W2 has requests (peers/catalog.py says
why): the others wait in its queue. The bandwidth, that of reading half a GiB in order, is measured
before the first repetition and after each. With --kinds, files are those of two-layers, the only
part is batches, and prompts have 64 tokens, so that its two figures are products of 64 rows and of
one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from compare import (
    NUM_THREADS,
    WARM_UP_TOKENS,
    Entrant,
    Run,
    cell,
    one_line,
    peer_entrant,
    setpoint_entrant,
    turn,
)
from contenders import Contender, HttpServer
from gguf_shapes import BLOCK_KINDS, KINDS, TWO_LAYERS
from machine import PACKAGES, bandwidth, environment, save, versions
from page_cache import drop_from_cache, read_into_cache
from peers.catalog import ik_llama_cpp, installed_versions, llama_cpp, missing
from peers.install import DEFAULT_DIR
from report import DECODE, OUTPUT, PREFILL, TTFT, Comparison, Report
from shapes import SHAPES
from single_batches import BatchError, Measure, llama_bench, one_batch
from workloads import FULL, QUICK, Workload

OURS, INT8 = "setpoint", "setpoint int8"
NUM_SLOTS, SLOT_TOKENS = 64, 768
"""W4's prompts have 512 tokens; llama.cpp rounds a slot up to 256."""
WORKLOADS = ("W1", "W2", "W4")
ANSWERS, MEMORY, STARTS, BATCHES = "answers", "memory", "starts", "batches"
PARTS = (ANSWERS, *WORKLOADS, MEMORY, STARTS, BATCHES)
COLUMNS = {"W1": (TTFT, DECODE), "W2": (OUTPUT,), "W4": (PREFILL,)}
LENGTHS, KIND_LENGTHS, QUICK_LENGTHS = (512, 128), (64, 64), (64, 8)
"""Tokens of the prompt, and tokens that are generated."""
ANSWER_TOKENS = 16
FILLED_TOKENS = 1024
FILLING = Workload("memory", "a prompt that fills the pool", 1, 0, FILLED_TOKENS - 16, 8)
"""Pages of a pool that nothing was written to are not in memory, so what a pool takes is known only
of a full one."""


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes of a server's processes together, the pages that several share counted once."""

    pss: int
    mapped: int
    """The part of ``pss`` that is pages of files: a mapped model, programs, libraries."""
    pool: int
    """The KV pool, as the server says."""


@dataclass(slots=True, frozen=True)
class Player:
    """A contender of all parts."""

    entrant: Entrant
    small: Entrant
    """The same with room for one stream of FILLED_TOKENS."""
    batches: Measure
    cache: Path | None = None
    """The folder in which it keeps what it makes of the file."""
    absent: str | None = None
    """Why it is not installed."""


@dataclass(slots=True)
class Figures:
    """What was measured on one file; each turn adds its own."""

    file_bytes: int
    run: Run
    """Warm starts and workloads."""
    first: Run = field(default_factory=lambda: Run({}))
    cold: Run = field(default_factory=lambda: Run({}))
    memory: dict[str, list[Memory]] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    prompt_rates: dict[str, list[float]] = field(default_factory=dict)
    generated_rates: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Contender -> why it has no figures of single batches."""
    warm_only: dict[str, str] = field(default_factory=dict)
    """Contender -> why it has no cold start, or no more."""
    bandwidth: list[float] = field(default_factory=list)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--files", help="SHAPE-KIND, comma-separated; default: six of three shapes")
    parser.add_argument("--kinds", action="store_true", help="the table of kinds of blocks")
    parser.add_argument("--contenders", help="comma-separated; Setpoint always runs")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="tiny workloads, one repetition: does everything work?"
    )
    parser.add_argument(
        "--name", help="keep the figures in benchmarks/results/<date>-<name>.json, file by file"
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_DIR / "shapes", help="of the files")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def asked_files(args: argparse.Namespace) -> list[str]:
    if args.files:
        return str(args.files).split(",")
    if args.kinds:
        return [f"{TWO_LAYERS}-{kind}" for kind in BLOCK_KINDS]
    return [f"{shape}-{kind}" for shape in SHAPES for kind in KINDS]


def asked_parts(args: argparse.Namespace) -> list[str]:
    """Raises ValueError for an unknown part."""
    parts = [BATCHES] if args.kinds else str(args.only).split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"--only: no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def players(model: Path, cache: Path, peers_dir: Path) -> list[Player]:
    """All contenders on one file. cache: Setpoint's folder of converted models."""
    precision = model.stem.rpartition("-")[2]
    environ = {"XDG_CACHE_HOME": str(cache)}
    found = []
    for name, own in ((OURS, []), (INT8, ["--quantization", "blocks_int8"])):
        both = [
            setpoint_entrant(
                name, precision, str(model), ["--max-total-tokens", str(tokens), *own], environ
            )
            for tokens in (NUM_SLOTS * SLOT_TOKENS, FILLED_TOKENS)
        ]
        batches = one_batch(model, own, environ, num_threads=NUM_THREADS)
        found.append(Player(*both, batches, cache / "setpoint" / "models"))
    for make in (llama_cpp, ik_llama_cpp):
        folder = peers_dir / ("llama.cpp" if make is llama_cpp else "ik_llama.cpp")
        of_file = partial(make, folder, model, precision, precision, NUM_THREADS)
        sizes = {"num_slots": 1, "slot_tokens": FILLED_TOKENS}
        peers = [of_file(slot_tokens=SLOT_TOKENS), of_file(**sizes)]
        both = [peer_entrant(replace(peer, name=peer.needs)) for peer in peers]
        batches = llama_bench(folder, model, num_threads=NUM_THREADS)
        found.append(Player(*both, batches, absent=missing(peers[0], peers_dir)))
    return found


def chosen(everybody: Sequence[Player], asked: str | None) -> list[Player]:
    """Setpoint and those whose names are asked for, comma-separated; None: all. Raises ValueError
    for an unknown name."""
    names = [each.entrant.name for each in everybody]
    wanted = names if asked is None else [OURS, *asked.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(names)}")
    return [each for each in everybody if each.entrant.name in wanted]


@contextmanager
def conversions() -> Iterator[Path]:
    """A cache folder of Setpoint without converted models, but with the compiled kernels."""
    with tempfile.TemporaryDirectory(prefix="ggufs-") as folder:
        own = Path(folder) / "setpoint"
        own.mkdir()
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "setpoint"
        (own / "kernels").symlink_to(usual / "kernels")
        yield Path(folder)


def memory_of(server: HttpServer) -> Memory:
    """What a server's processes hold now. Raises psutil.NoSuchProcess if it has ended."""
    processes = [
        each for name, group in server.processes().items() if name != "client" for each in group
    ]
    rollups = []
    for process in processes:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        if not text:
            raise psutil.NoSuchProcess(process.pid)
        rollups.append(
            {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
        )
    pss, mapped = (sum(each[name] for each in rollups) for name in ("Pss", "Pss_File"))
    return Memory(pss, mapped, pool_bytes(server))


def pool_bytes(server: HttpServer) -> int:
    """The size of the KV pool: from the log of llama.cpp or ik_llama.cpp, or from Setpoint."""
    parts = re.findall(r"KV buffer size\s*=\s*([\d.]+) MiB", server.log())
    if parts:
        return round(sum(map(float, parts)) * 2**20)
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=60) as response:
        return int(json.load(response)["kv_bytes"])


def answers_of(server: HttpServer) -> list[str]:
    """Greedy answers to four prompts of ids. Raises OSError."""
    texts = []
    for first in range(1000, 5000, 1000):
        body = {
            "model": "default",
            "prompt": list(range(first, first + 24)),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            texts.append(json.load(response)["choices"][0]["text"])
    return texts


def short_warm_up(workload: Workload) -> Workload:
    """A quarter of the prompts: those of W4 take as long as what is measured."""
    return replace(
        workload,
        num_requests=-(-workload.num_requests // 4),
        output_tokens=min(WARM_UP_TOKENS, workload.output_tokens),
    )


class Measuring:
    """The turns on one file, which exists. They add to ``figures``."""

    def __init__(
        self,
        model: Path,
        everybody: Sequence[Player],
        parts: Sequence[str],
        workloads: Sequence[Workload],
        lengths: tuple[int, int],
    ) -> None:
        self.figures = Figures(
            model.stat().st_size, Run({workload.name: {} for workload in workloads})
        )
        self.figures.run.skipped |= {
            each.entrant.name: each.absent for each in everybody if each.absent is not None
        }
        self._model, self._everybody, self._parts = model, everybody, parts
        self._workloads, self._lengths = workloads, lengths

    async def measure(self, reps: int) -> None:
        read_into_cache(self._model)
        # Setpoint's, which converts the file, so that no later start of a variant does.
        await self._turn(self._everybody[0], (), 0, self.figures.first)
        if ANSWERS in self._parts:
            for player in self._players():
                await self._turn(player, (), 0, Run({}), self._ask)
        self.figures.bandwidth.append(bandwidth(NUM_THREADS))
        for repetition in range(reps):
            for player in self._players()[:: 1 if repetition % 2 == 0 else -1]:
                await self._measure(player, repetition)
            self.figures.bandwidth.append(bandwidth(NUM_THREADS))

    def _players(self) -> list[Player]:
        skipped = self.figures.run.skipped
        return [each for each in self._everybody if each.entrant.name not in skipped]

    async def _measure(self, player: Player, repetition: int) -> None:
        name, figures = player.entrant.name, self.figures
        if self._workloads or STARTS in self._parts:
            read_into_cache(self._model)
            await self._turn(player, self._workloads, repetition, figures.run)
        if MEMORY in self._parts:
            small = replace(player, entrant=player.small)
            await self._turn(small, [FILLING], repetition, Run({FILLING.name: {}}), self._weigh)
        if STARTS in self._parts:
            own = player.cache.rglob("*") if player.cache else ()
            try:
                for path in (self._model, *own):
                    if path.is_file():
                        drop_from_cache(path)
            except RuntimeError as error:
                figures.warm_only[name] = str(error)
            else:
                await self._turn(player, (), repetition, figures.cold)
        if BATCHES in self._parts and name not in figures.run.skipped:
            # Whether its build is the machine's is seen when its server starts.
            await self._turn(player, (), repetition, Run({}))
            self._single_batches(player)

    async def _turn(
        self,
        player: Player,
        workloads: Sequence[Workload],
        repetition: int,
        run: Run,
        at_end: Callable[[Contender], None] = lambda contender: None,
    ) -> None:
        if player.entrant.name in self.figures.run.skipped:
            return
        await turn(
            player.entrant, workloads, repetition, run, 0, warm_up=short_warm_up, at_end=at_end
        )
        self.figures.run.skipped |= run.skipped

    def _weigh(self, contender: Contender) -> None:
        assert isinstance(contender, HttpServer)
        try:
            self.figures.memory.setdefault(contender.name, []).append(memory_of(contender))
        except (OSError, psutil.NoSuchProcess) as error:  # its workloads say that it has ended
            print(f"{contender.name}: no memory: {error}", file=sys.stderr)

    def _ask(self, contender: Contender) -> None:
        assert isinstance(contender, HttpServer)
        try:
            self.figures.answers[contender.name] = answers_of(contender)
        except OSError as error:
            self.figures.answers[contender.name] = [f"failed: {error}"]

    def _single_batches(self, player: Player) -> None:
        name, figures = player.entrant.name, self.figures
        if name in figures.run.skipped or name in figures.failed:
            return
        try:
            rates = player.batches(*self._lengths)
        except BatchError as error:
            figures.failed[name] = str(error)
            return
        figures.prompt_rates.setdefault(name, []).extend(rates.prompt)
        figures.generated_rates.setdefault(name, []).extend(rates.generated)
        print(f"batches {name}: {rates}", file=sys.stderr, flush=True)


@dataclass(slots=True, frozen=True)
class Row:
    """One figure of all contenders on one file."""

    what: str
    higher_is_better: bool
    values: Mapping[str, Sequence[float]]
    failed: Mapping[str, str]
    """Contender -> why it has no figure."""


def rows_of(
    figures: Figures,
    names: Sequence[str],
    workloads: Sequence[Workload],
    lengths: tuple[int, int],
) -> list[Row]:
    """The figures that were measured."""
    found, judged = [], Report(workloads, figures.run.results)
    for workload in workloads:
        errors = {
            name: sample.errors[0]
            for name, samples in figures.run.results[workload.name].items()
            for sample in samples
            if sample.errors
        }
        for metric in COLUMNS[workload.name]:
            values = {name: judged.values(workload, name, metric) for name in names}
            what = f"{workload.name} {metric.name}, {metric.unit}"
            found.append(Row(what, metric.higher_is_better, values, errors))
    beside = {
        name: [(each.pss - each.pool) / figures.file_bytes for each in weighed]
        for name, weighed in figures.memory.items()
    }
    found.append(Row("memory beside the pool, × the file", False, beside, {}))
    for what, run, reasons in (
        ("warm", figures.run, {}),
        ("cold", figures.cold, figures.warm_only),
        ("first", figures.first, {}),
    ):
        found.append(Row(f"{what} start, s", False, run.start_s, reasons))
    for what, rates, count in (
        ("pp", figures.prompt_rates, lengths[0]),
        ("tg", figures.generated_rates, lengths[1]),
    ):
        found.append(Row(f"{what}{count}, tok/s", True, rates, figures.failed))
    return [row for row in found if any(row.values.values()) or row.failed]


def table(rows: Mapping[str, Sequence[Row]], names: Sequence[str]) -> str:
    """The rows of each file in Markdown, with how many times as good Setpoint and its int8 variant
    are as each peer."""
    own = [name for name in (OURS, INT8) if name in names]
    pairs = [(mine, peer) for mine in own for peer in names if peer not in (OURS, INT8)]
    heads = [*names, *(f"{mine} against {peer}" for mine, peer in pairs)]
    lines = ["| file | figure | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for file, found in rows.items():
        for row in found:
            cells = []
            for name in names:
                reason = row.failed.get(name)
                spread = cell(row.values.get(name, []), [], higher_is_better=row.higher_is_better)
                cells.append(spread if reason is None else f"failed: {one_line(reason)}")
            for mine, peer in pairs:
                ours, theirs = row.values.get(mine, []), row.values.get(peer, [])
                is_known = ours and theirs and not {mine, peer} & row.failed.keys()
                ratio = Comparison(ours, theirs, row.higher_is_better) if is_known else "–"
                cells.append(str(ratio))
            lines.append(f"| {file} | {row.what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def num_same(one: str, other: str) -> int:
    """How many letters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def notes(file: str, figures: Figures) -> str:
    """What a table does not hold: the bandwidth, who has no turn and why, and the answers."""
    rates = ", ".join(f"{rate / 1e9:.1f}" for rate in figures.bandwidth)
    lines = [f"{file}: {figures.file_bytes / 1e9:.2f} GB; bandwidth {rates} GB/s"]
    lines += [f"{name}: skipped: {reason}" for name, reason in figures.run.skipped.items()]
    for name, texts in figures.answers.items():
        ours = figures.answers.get(OURS, texts)
        same = [
            f"{num_same(mine, text)} of {len(mine)}"
            for mine, text in zip(ours, texts, strict=False)
        ]
        lines.append(f"answers of {name} begin as {OURS}'s: {', '.join(same)} letters")
        lines += [f"    {text!r}" for text in texts]
    return "\n".join(lines)


def record(figures: Figures) -> dict[str, Any]:
    """The figures as the result file has them."""
    return {
        "bytes": figures.file_bytes,
        "bandwidth": figures.bandwidth,
        "skipped": figures.run.skipped,
        "failed": {"batches": figures.failed, "cold": figures.warm_only},
        "answers": figures.answers,
        "start_s": {
            "first": figures.first.start_s,
            "cold": figures.cold.start_s,
            "warm": figures.run.start_s,
        },
        "memory": {
            name: [asdict(each) for each in weighed] for name, weighed in figures.memory.items()
        },
        "prompt_tokens_per_s": figures.prompt_rates,
        "generated_tokens_per_s": figures.generated_rates,
        "samples": {
            name: {who: [asdict(one) for one in samples] for who, samples in by.items()}
            for name, by in figures.run.results.items()
        },
    }


def keep(args: argparse.Namespace, measured: Mapping[str, Figures], load: float) -> Path:
    figures = {
        "workloads": [asdict(workload) for workload in FULL if workload.name in WORKLOADS],
        "files": {file: record(found) for file, found in measured.items()},
    }
    packages = versions(*PACKAGES) | installed_versions(args.peers_dir)
    return save(args.results, args.name, figures, packages=packages, load=load)


def main() -> int:
    args, load = parse(), os.getloadavg()[0]
    try:
        parts, files = asked_parts(args), asked_files(args)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    models = {file: args.folder / f"{file}.gguf" for file in files}
    if absent := [str(path) for path in models.values() if not path.exists()]:
        raise SystemExit(f"Not there: {', '.join(absent)}; benchmarks/gguf_shapes.py makes them.")
    workloads = [each for each in (QUICK if args.quick else FULL) if each.name in parts]
    lengths = QUICK_LENGTHS if args.quick else KIND_LENGTHS if args.kinds else LENGTHS
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}\n", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured: dict[str, Figures] = {}
    names: list[str] = []
    whole = True
    try:
        for file, model in models.items():
            with conversions() as cache:
                everybody = chosen(players(model, cache, args.peers_dir), args.contenders)
                names = [each.entrant.name for each in everybody]
                measuring = Measuring(model, everybody, parts, workloads, lengths)
                measured[file] = measuring.figures
                asyncio.run(measuring.measure(1 if args.quick else args.reps))
            if args.name is not None:
                keep(args, measured, load)
    except KeyboardInterrupt:
        print("Interrupted: only what was measured until then follows.", file=sys.stderr)
        whole = False
    if args.name is not None:
        print(f"written: {keep(args, measured, load)}", file=sys.stderr)
    rows = {file: rows_of(found, names, workloads, lengths) for file, found in measured.items()}
    print(table(rows, names))
    print("\nMedian (lowest – highest); how many times as good Setpoint is.\n")
    print("\n".join(notes(file, found) for file, found in measured.items()))
    for name, pin in installed_versions(args.peers_dir).items():
        print(f"{name} {pin}")
    return 0 if whole and not any(found.run.skipped for found in measured.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
