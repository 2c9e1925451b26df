"""The comparison with peers: how they are started, and that whatever goes wrong with one is a row
with the reason."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import chart
import compare
import machine
import psutil
import pytest
import shapes
import torch
from compare import Entrant, Run
from contenders import Contender, HttpServer, Sample, free_port
from peer_process import PeerProcess
from peers import install
from peers.catalog import Peer, catalog, default_copies, missing
from safetensors.torch import load_file
from workloads import QUICK, VOCAB, Workload

from setpoint.checkpoint.source import locate
from setpoint.checkpoint.spec import read_spec
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.server_process import wait_until
from setpoint_testing.tiny_models import write_tiny_llama

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, how = int(sys.argv[1]), sys.argv[2]
if how == "ends":
    sys.exit("no such model")
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(503 if how == "loads for ever" else 200, b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if how == "errors":
            return self.reply(500, b"out of slots")
        usage = {"completion_tokens": asked["max_tokens"] - (how == "stops early")}
        if not asked["stream"]:
            return self.reply(200, json.dumps({"usage": usage}).encode())
        chunks = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}]
        self.reply(200, b"".join(b"data: " + json.dumps(chunk).encode() + b"\\n\\n" for chunk in chunks) + b"data: [DONE]\\n\\n")
    def log_message(self, *_): pass
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
W1, W2 = QUICK[:2]


def fake(name: str, how: str) -> Entrant:
    def start() -> Contender:
        port = free_port()
        command = [sys.executable, "-c", SERVER, str(port), how]
        return HttpServer(
            name,
            command,
            port=port,
            environment={},
            start_timeout_s=1.0 if how == "loads for ever" else 60.0,
        )

    return Entrant(name, "bf16", start)


def run_all(
    *rivals: Entrant, reps: int = 1, workloads: tuple[Workload, ...] = (W1, W2)
) -> tuple[Run, str]:
    run, ours = Run({workload.name: {} for workload in workloads}), fake("setpoint", "works")
    asyncio.run(compare.compare(ours, rivals, workloads, run, reps=reps, patience_s=0.0))
    return run, compare.table(ours, rivals, workloads, run)


def row(table: str, name: str) -> str:
    (found,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return found


def test_setpoint_has_a_turn_before_every_peers() -> None:
    run, table = run_all(fake("one", "works"), fake("two", "works"), reps=2)
    assert {who: len(samples) for who, samples in run.results["W2"].items()} == {
        "setpoint": 4,
        "one": 2,
        "two": 2,
    }
    assert {who: len(seconds) for who, seconds in run.start_s.items()} == {
        "setpoint": 4,
        "one": 2,
        "two": 2,
    }
    assert not any(
        sample.errors
        for by in run.results.values()
        for samples in by.values()
        for sample in samples
    )
    assert row(table, "one").count(" ×") == 3, "ratios of W1's two figures and W2's"
    assert " ×" not in row(table, "setpoint")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("ends", "ended with code 1; the end of its log: no such model"),
        ("loads for ever", "was not ready after 1 s"),
    ],
)
def test_a_server_that_does_not_come_up_is_a_row_with_the_reason(how: str, reason: str) -> None:
    run, table = run_all(fake("bad", how), fake("good", "works"), reps=2)
    assert f"skipped: bad {reason}" in row(table, "bad")
    assert "bad" not in run.results["W1"]
    assert len(run.results["W1"]["good"]) == 2, "the others are measured all the same"


def test_a_server_with_a_log_that_says_it_is_slow_is_a_row_with_the_reason() -> None:
    def start() -> Contender:
        port = free_port()
        return HttpServer(
            "slow",
            [sys.executable, "-c", f"print('AVX2 only', flush=True){SERVER}", str(port), "works"],
            port=port,
            environment={},
            refusal=lambda log: "it has AVX2 only" if "AVX2 only" in log else None,
        )

    run, table = run_all(Entrant("slow", "bf16", start))
    assert "skipped: slow is not measured: it has AVX2 only" in row(table, "slow")
    assert "slow" not in run.results["W1"]


def test_a_program_that_is_not_there_is_a_row_with_the_reason(tmp_path: Path) -> None:
    peer = Peer("gone", "bf16", "gone", lambda port: [str(tmp_path / "no-such-program"), str(port)])
    _, table = run_all(compare.peer_entrant(peer))
    assert "skipped: gone did not start" in row(table, "gone")
    assert "No such file" in row(table, "gone")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("errors", "status 500: out of slots"), ("stops early", "asked for 8 tokens, got")],
)
def test_errors_are_no_throughput(how: str, reason: str) -> None:
    run, table = run_all(fake("bad", how))
    assert reason in row(table, "bad")
    assert "tok/s" not in row(table, "bad")
    assert all(sample.errors for sample in run.results["W2"]["bad"])


def test_a_peer_process_that_ends_says_so() -> None:
    _, table = run_all(
        Entrant(
            "bad",
            "bf16",
            lambda: PeerProcess("bad", [sys.executable, "-c", "exit('no torch')"], environment={}),
        )
    )
    assert "skipped: bad ended; the end of its log: no torch" in row(table, "bad")


def test_every_process_of_a_contender_ends_with_it(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
with open("pid", "w") as file:
    file.write(str(child.pid))
os.rename("pid", "child")
time.sleep(99)
"""
    script = f"import os; os.chdir({str(tmp_path)!r})" + script
    server = HttpServer(
        "family", [sys.executable, "-c", script], port=1, environment={}, start_timeout_s=60.0
    )
    wait_until((tmp_path / "child").exists)
    server.close()
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_failed_installation_leaves_its_reason(tmp_path: Path) -> None:
    peer = next(
        each
        for each in catalog(tmp_path, default_copies(tmp_path, Path("model")), num_threads=2)
        if each.needs == "llama.cpp"
    )
    assert missing(peer, tmp_path) == "not installed: python benchmarks/peers/install.py llama.cpp"

    def broken(folder: Path) -> dict[str, str]:
        install.run(sys.executable, "-c", "raise SystemExit(3)")
        return {}

    reason = install.install("llama.cpp", broken, tmp_path / "llama.cpp")
    assert reason is not None
    assert "exit status 3" in reason
    assert missing(peer, tmp_path) == f"could not be installed: {reason}"
    assert (
        install.install("llama.cpp", lambda folder: {"llama.cpp": "1"}, tmp_path / "llama.cpp")
        is None
    )
    assert missing(peer, tmp_path) is None, "a later success takes the failure's place"


@pytest.mark.parametrize("peer", install.METHODS)
def test_a_python_without_the_packages_is_told_before_anything_is_done(
    peer: str, tmp_path: Path
) -> None:
    """-S: a Python without site-packages, as that of a system is."""
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            install.__file__,
            peer,
            "--peers-dir",
            str(tmp_path / "peers"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert install.NEEDS[peer][-1] in done.stderr
    assert ".venv/bin/python benchmarks/peers/install.py" in done.stderr
    assert not (tmp_path / "peers").exists()


def test_who_is_not_installed_is_in_the_table(tmp_path: Path) -> None:
    run = Run({"W1": {}})
    args = compare.parse(
        [
            "--peers-dir",
            str(tmp_path),
            "--contenders",
            "vLLM,transformers",
            "--variant",
            "cold=--disable-radix-cache",
        ]
    )
    copies = default_copies(tmp_path, Path("model"))
    ours, rivals = compare.entrants(args, copies, run)
    assert [each.name for each in rivals] == ["transformers"]
    assert "skipped: not installed: python benchmarks/peers/install.py vllm" in row(
        compare.table(ours, rivals, [W1], run), "vLLM"
    )
    args.contenders = "cold,vllm"
    with pytest.raises(ValueError, match="no vllm; there are cold"):
        compare.entrants(args, copies, run)


def test_every_server_gets_the_same_threads_and_room(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "venv" / "lib").mkdir(parents=True)
    (tmp_path / "vllm" / "venv" / "lib" / "libiomp5.so").touch()
    copies = default_copies(tmp_path, Path("the-model"))
    peers = {peer.name: peer for peer in catalog(tmp_path, copies, num_threads=3)}
    llama = peers["llama.cpp Q8_0"].command(1234)
    for flag, value in (
        ("--port", "1234"),
        ("--threads", "3"),
        ("--threads-batch", "3"),
        ("--parallel", "64"),
        ("--ctx-size", "81920"),
    ):
        assert llama[llama.index(flag) + 1] == value
    assert llama[llama.index("--model") + 1].endswith("Q8_0.gguf")
    vllm = peers["vLLM"].command(1234)
    assert vllm[vllm.index("--model") + 1] == str(tmp_path / "bf16")
    assert "--enforce-eager" not in vllm
    assert "--enforce-eager" in peers["vLLM eager"].command(1)
    assert peers["vLLM W8A8"].command(1)[4].endswith("w8a8")
    assert peers["vLLM"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
    assert peers["vLLM"].environment["LD_PRELOAD"].endswith("libiomp5.so")
    openvino = peers["OpenVINO int8"]
    assert openvino.offline
    assert openvino.command(0)[2].endswith("openvino/int8")
    assert openvino.command(0)[3:] == ["--num-threads", "3"]


def test_everybody_serves_the_shape_that_is_asked_for(tmp_path: Path) -> None:
    args = compare.parse(["--shape", "tiny", "--peers-dir", str(tmp_path)])
    with pytest.raises(ValueError, match=r"--shape tiny: not there; python benchmarks/shapes\.py"):
        compare.served(args)
    folder = tmp_path / "shapes" / "tiny"
    (folder / "bf16").mkdir(parents=True)
    copies = compare.served(args)
    models = {
        peer.name: next(word for word in peer.command(1) if str(folder) in word)
        for peer in catalog(tmp_path, copies, num_threads=2)
    }
    assert {name: Path(model).name for name, model in models.items()} == {
        "llama.cpp BF16": "BF16.gguf",
        "llama.cpp Q8_0": "Q8_0.gguf",
        "llama.cpp Q4_0": "Q4_0.gguf",
        "ik_llama.cpp BF16": "BF16.gguf",
        "ik_llama.cpp Q8_0": "Q8_0.gguf",
        "ik_llama.cpp Q4_0": "Q4_0.gguf",
        "vLLM": "bf16",
        "vLLM eager": "bf16",
        "vLLM W8A8": "w8a8",
        "OpenVINO fp16": "fp16",
        "OpenVINO int8": "int8",
    }
    ours, _ = compare.entrants(args, copies, Run({"W1": {}}))
    arguments = ours.description["arguments"]
    assert isinstance(arguments, list)
    assert arguments[:2] == ["--model-path", str(folder / "bf16")]


@pytest.mark.parametrize("shape", list(shapes.SHAPES))
def test_a_shape_is_a_checkpoint_with_one_set_of_weights(shape: str, tmp_path: Path) -> None:
    tokenizer = write_tiny_llama(tmp_path / "tokenizer")
    write_byte_tokenizer(tokenizer)
    smaller = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    for name in ("one", "two"):
        shapes.write_model(shapes.SHAPES[shape] | smaller, tokenizer, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {weight.dtype for weight in one.values()} == {torch.bfloat16}
    assert one["model.layers.0.mlp.up_proj.weight"].float().std() == pytest.approx(0.02, rel=0.1)
    used = one["model.embed_tokens.weight"].float().norm(dim=1).nonzero().flatten()
    assert (int(used[0]), int(used[-1]) + 1) == VOCAB, "no answer has an id without text"
    source = locate(str(tmp_path / "one"), log=lambda line: None)
    spec = read_spec(source.folder)
    assert spec.vocab_size == shapes.SHAPES[shape]["vocab_size"]


def record() -> dict[str, object]:
    def samples(*walls: float) -> list[dict[str, object]]:
        return [asdict(Sample(wall, ttft_s=0.1, decode_s=wall)) for wall in walls]

    return {
        "date": "2026-01-02",
        "machine": {"cpu": "a <fast> one", "cpus": 2},
        "commit": "abc",
        "workloads": [asdict(W1), asdict(W2)],
        "contenders": {"setpoint": {"precision": "bf16"}, "other": {"precision": "8 bit"}},
        "skipped": {"vLLM": "no wheel\nfor this machine"},
        "samples": {
            "W1": {"setpoint": samples(1.0, 2.0, 4.0), "other": samples(8.0)},
            "W2": {
                "setpoint": samples(1.0),
                "other": [asdict(Sample(1.0, errors=("status 500",)))],
            },
        },
    }


def test_the_chart_draws_medians_ranges_and_reasons() -> None:
    picture = chart.chart(json.loads(json.dumps(record())))
    root = ET.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    bars = [float(bar.attrib["width"]) for bar in root.iter(f"{name}rect")]
    # 7 tokens in 2 s at the median against 8 s; the longest whisker (1 s) fills the width.
    assert bars[0] == pytest.approx(4 * bars[1], rel=0.01)
    whisker_end = next(root.iter(f"{name}polyline")).attrib["points"].split()[-1]
    begin = float(next(root.iter(f"{name}rect")).attrib["x"])
    assert float(whisker_end.partition(",")[0]) - begin == pytest.approx(2 * bars[0], rel=0.01)
    words = [each.text for each in root.iter(f"{name}text")]
    assert "vLLM: skipped: no wheel for this machine" in words
    assert "failed" in words
    assert words.count("other, 8 bit") == 2
    assert any("a <fast> one" in str(each) for each in words)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama.cpp BF16", "vLLM eager"])
def test_an_installed_peer_answers(name: str) -> None:
    where = install.DEFAULT_DIR
    peers = catalog(where, default_copies(where, Path("model")), num_threads=2)
    peer = next(each for each in peers if each.name == name)
    if (reason := missing(peer, where)) is not None:
        pytest.skip(reason)
    command = [sys.executable, compare.__file__, "--quick", "--contenders", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped" not in row(done.stdout, name)
    assert "failed" not in row(done.stdout, name)


def test_a_kept_result_does_not_say_where_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(home: str, *paths: str) -> list[str]:
        monkeypatch.setenv("HOME", home)
        path = machine.save(tmp_path, "peers", {"command": paths}, packages={}, load=0.0)
        return json.loads(path.read_text())["command"]

    assert kept("/home/it", "/home/it/bin/server", "/home/item", "/home/it", "/a:/home/it/b") == [
        "~/bin/server",
        "/home/item",
        "~",
        "/a:~/b",
    ]
    assert kept("/root", "/mnt/root/x", "--path=/root/x") == ["/mnt/root/x", "--path=~/x"]
    assert kept("/", "http://127.0.0.1/x", "/x") == ["http://127.0.0.1/x", "/x"]
    script = f"{machine.REPOSITORY}/benchmarks/peers/openvino_peer.py"
    assert kept("/home/it", script) == ["benchmarks/peers/openvino_peer.py"]
