"""A mixture whose experts several engines compute together (--enable-dp-attention): the answers of
one engine, whatever is asked for and whichever engine is ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_disaggregation import Pair
from test_recovery import all_ready, get, post, states, stream, streams
from test_tensor_parallel import run

from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.server_process import (
    ServerProcess,
    engines_of,
    free_port,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

TWO = ("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    golden = next(each for each in GOLDENS if each.name == "qwen3_moe: three of eight experts")
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    folder = write_tiny(
        tmp_path_factory.mktemp("model"), golden.config | sizes | {"max_position_embeddings": 4096}
    )
    write_byte_tokenizer(folder)
    return folder


@contextmanager
def serving(model: Path, where: Path, *options: str) -> Iterator[ServerProcess]:
    with running_server(
        where,
        *("--model-path", str(model), "--update-weights-folder", str(model.parent)),
        *("--num-threads", "1", "--max-total-tokens", "40960"),
        *options,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine answers."""
    with serving(model, tmp_path_factory.mktemp("alone")) as server:
        return streams(server, lambda: None)


def test_two_engines_answer_as_one(model: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    with serving(model, tmp_path, *TWO) as server:
        assert stream(server, "greedy") == alone["greedy"]  # the other engine has nothing to do
        assert streams(server, lambda: None) == alone
        info = get(server, "/server_info").json()
        assert (info["dp_size"], info["enable_dp_attention"]) == (2, True)
        assert info["schedule_conservativeness"] == pytest.approx(0.3)
        refused = post(server, "/release_memory_occupation")
        assert refused.status_code == 400
        assert "--enable-dp-attention" in refused.text
        assert "DP1 TP1] Load weight end" in server.errors
        assert "with --enable-dp-attention, as in SGLang" in server.errors


@pytest.mark.full
def test_prefill_and_decode_servers_of_such_engines(model: Path, tmp_path: Path) -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    texts = ["a short one", "a long prompt, " * 20, "a third one for the first engine"]
    with serving(model, tmp_path / "alone") as server:
        expected = [server.generate(text=text, sampling_params=sampling) for text in texts]
    port = free_port()
    mode, at = "--disaggregation-mode", ("--disaggregation-bootstrap-port", str(port))
    with (
        serving(model, tmp_path / "p", *TWO, mode, "prefill", *at) as prefill,
        serving(model, tmp_path / "d", *TWO, mode, "decode", "--enable-metrics") as decode,
    ):
        pair = Pair(prefill, decode, port)
        for room, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
            found = pair.post("/generate", room, text=text, sampling_params=sampling)[1].json()
            assert found["output_ids"] == wanted["output_ids"]
        assert pair.failures() == 0
        assert prefill.errors.count("A decode server has connected") >= 2


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("--chunked-prefill-size", "8"),
        ("--disable-cuda-graph", "--disable-radix-cache"),
        ("--ep-size", "2", "--ep-num-redundant-experts", "2"),
    ],
)
def test_however_steps_run(
    model: Path, tmp_path: Path, alone: dict[str, Any], options: tuple[str, ...]
) -> None:
    with serving(model, tmp_path, *TWO, *options) as server:
        assert streams(server, lambda: None) == alone


@pytest.mark.full
def test_streams_go_on_when_an_engine_ends(
    model: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """All end with it, and all start again."""
    with serving(model, tmp_path, *TWO) as server:
        for number, rank in ((signal.SIGKILL, 0), (signal.SIGSEGV, 1)):
            before = engines_of(server.process.pid)

            def disturb(number: int = number, victim: Any = before[rank]) -> None:
                wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
                victim.send_signal(number)

            assert streams(server, disturb) == alone
            all_ready(server, 2)
            assert not any(engine.is_running() for engine in before)
        assert "(2 of at most 10 in an hour)" in server.errors
        assert "(3 of at most" not in server.errors


@pytest.mark.full
def test_one_engine_paused(model: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    with serving(model, tmp_path, *TWO) as server:
        apply = {"instruction": "pause", "params": {"dp_ranks": [0]}}
        assert post(server, "/fault_tolerance/apply", **apply).status_code == 202
        assert stream(server, "greedy") == alone["greedy"]
        refused = {"instruction": "scale_down", "params": {"removed_dp_ranks": [0]}}
        assert "compute in step" in post(server, "/fault_tolerance/apply", **refused).text


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dp-size", "1"), "--dp-size is 1"),
        (("--dp-size", "2"), "needs --tp-size 2, because"),
        (("--dp-size", "2", "--tp-size", "2", "--nnodes", "2"), "combined with --nnodes 2"),
    ],
)
def test_refused(model: Path, options: tuple[str, ...], message: str) -> None:
    done = run("--model-path", str(model), "--enable-dp-attention", *options)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.full
def test_one_engine_stopped(model: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    """No engine can compute meanwhile, and the watchdog ends none of them for it."""
    with serving(model, tmp_path, *TWO, "--watchdog-timeout", "10") as server:
        victim = engines_of(server.process.pid)[1]

        def disturb() -> None:
            wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
            victim.send_signal(signal.SIGSTOP)
            try:
                for path in ("/ready", "/health"):
                    wait_until(lambda path=path: get(server, path).status_code == 503)
                time.sleep(15)
            finally:
                victim.send_signal(signal.SIGCONT)

        assert streams(server, disturb) == alone
        assert ": stopped" not in get(server, "/ready").text
        assert "died" not in server.errors


@pytest.mark.full
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama")
    done = run("--model-path", str(tmp_path / "llama"), *TWO)
    assert done.returncode == 2
    assert "LlamaForCausalLM has none. Leave it out: --dp-size 2 alone" in done.stderr
