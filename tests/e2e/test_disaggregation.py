"""A prefill and a decode server: the same answers as one server gives, and what happens when one of
them dies, aborts or does not fit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_recording import replay

from setpoint.handover.announcements import announced
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engine_of,
    free_port,
    running_server,
    wait_until,
)

HOST = "127.0.0.1"
ROOMS = count(1 << 40)
TEXT = "What two servers compute together, one computes alone. "


def base(tiny_model: Path) -> tuple[str, ...]:
    return (
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--enable-metrics", "--enable-cache-report"),
    )


class Pair:
    def __init__(self, prefill: ServerProcess, decode: ServerProcess, port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.port = port

    def in_room(self, room: int | None = None) -> dict[str, Any]:
        room = next(ROOMS) * 64 if room is None else room
        return {"bootstrap_host": HOST, "bootstrap_port": self.port, "bootstrap_room": room}

    def post(
        self, path: str, room: int | None = None, **body: Any
    ) -> tuple[httpx.Response, httpx.Response]:
        """The answers of the prefill and the decode server, as a router gets them."""
        body = body | self.in_room(room)
        with ThreadPoolExecutor(2) as pool:
            found = [
                pool.submit(httpx.post, server.url + path, json=body, timeout=PATIENCE_S)
                for server in (self.prefill, self.decode)
            ]
        return found[0].result(), found[1].result()

    def generate(self, **body: Any) -> Any:
        """The decode server's answer."""
        prefill, decode = self.post("/generate", **body)
        assert prefill.status_code == 200, prefill.text
        assert decode.status_code == 200, decode.text
        return decode.json()

    def failures(self) -> float:
        """How many prompts the decode server had to compute itself."""
        return metric(self.decode, "sglang:num_transfer_failed_reqs_total")

    def is_idle(self) -> bool:
        return self.prefill.is_idle() and self.decode.is_idle()


def metric(server: ServerProcess, name: str, *, api_key: str = "none") -> float:
    headers = {"Authorization": f"Bearer {api_key}"}
    page = httpx.get(f"{server.url}/metrics", headers=headers, timeout=PATIENCE_S).text
    found = [line for line in page.splitlines() if re.match(rf"{name}[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextmanager
def pair_of(tiny_model: Path, folder: Path, *options: str, decode: tuple[str, ...] = ()) -> Any:
    port, common = free_port(), (*base(tiny_model), *options)
    with (
        running_server(
            folder / "prefill",
            *common,
            *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
        ) as prefill,
        running_server(
            folder / "decode", *common, *decode, "--disaggregation-mode", "decode"
        ) as decoding,
    ):
        yield Pair(prefill, decoding, port)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(
        tiny_model, tmp_path_factory.mktemp("pair"), "--disaggregation-enable-kv-checksum"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("alone"), *base(tiny_model)) as server:
        yield server


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "sampling_seed": 11},
    "penalties": {"temperature": 0.8, "sampling_seed": 5, "frequency_penalty": 1.0},
    "minimum": {"temperature": 0, "min_new_tokens": 6},
    "one token": {"temperature": 0, "max_new_tokens": 1},
    "no token": {"temperature": 0, "max_new_tokens": 0},
    "stop": {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": False, "stop_token_ids": [97]},
    "regex": {"temperature": 1.0, "sampling_seed": 7, "regex": "[a-f]{3}(xyz){4}[0-9]{5}"},
    "schema": {
        "temperature": 1.0,
        "sampling_seed": 8,
        "json_schema": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}',
    },
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 40, 700])
def test_two_servers_give_the_tokens_of_one(
    pair: Pair, alone: ServerProcess, name: str, length: int
) -> None:
    sampling = {"max_new_tokens": 24, "ignore_eos": True, **CASES[name]}
    text = (TEXT * 20)[:length]
    failures = pair.failures()
    expected = alone.generate(text=text, sampling_params=sampling)
    found = pair.generate(text=text, sampling_params=sampling)
    assert found["output_ids"] == expected["output_ids"]
    assert found["text"] == expected["text"]
    for key in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert found["meta_info"][key] == expected["meta_info"][key]
    assert pair.failures() == failures


def test_logprobs_of_outputs_are_those_of_one_server(pair: Pair, alone: ServerProcess) -> None:
    body = {
        "text": TEXT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    expected = alone.generate(**body)["meta_info"]
    prefill, decode = pair.post("/generate", **body)
    found = decode.json()["meta_info"]
    assert [each[1] for each in found["output_token_logprobs"]] == [
        each[1] for each in expected["output_token_logprobs"]
    ]
    for ours, theirs in zip(
        found["output_token_logprobs"], expected["output_token_logprobs"], strict=True
    ):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    assert len(found["output_top_logprobs"]) == 8
    # A router puts those of the prompt, which the prefill server has, before decode's own.
    of_prompt = prefill.json()["meta_info"]["input_token_logprobs"]
    assert len(of_prompt) == expected["prompt_tokens"]
    assert not found["input_token_logprobs"]


def test_samples_batches_and_streams(pair: Pair, alone: ServerProcess) -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 4, "max_new_tokens": 12, "n": 3}
    expected = alone.generate(text=TEXT, sampling_params=sampling)
    found = pair.generate(text=TEXT, sampling_params=sampling)
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in expected]
    texts = [TEXT, TEXT[:9], TEXT * 3]
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    expected = alone.generate(text=texts, sampling_params=greedy)
    rooms = [next(ROOMS) * 64 for _ in texts]
    _, decode = pair.post(
        "/generate",
        rooms,
        text=texts,
        sampling_params=greedy,  # type: ignore[arg-type]
    )
    assert [each["text"] for each in decode.json()] == [each["text"] for each in expected]
    body = {"model": "default", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "stream": True}
    whole = httpx.post(
        f"{alone.url}/v1/completions", json=body | {"stream": False}, timeout=PATIENCE_S
    )
    _, streamed = pair.post("/v1/completions", **body)
    pieces = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(each)["choices"][0]["text"] for each in pieces)
    assert text == whole.json()["choices"][0]["text"]


def test_what_decode_has_in_its_cache_is_not_sent_again(pair: Pair) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    text = "a long beginning " * 30
    pair.generate(text=text + "x", sampling_params=greedy)
    before = metric(pair.decode, "sglang:kv_transfer_total_mb_sum")
    pair.generate(text=text + "y", sampling_params=greedy)
    sent = metric(pair.decode, "sglang:kv_transfer_total_mb_sum") - before
    assert 0 < sent < 0.2 * before


def test_a_request_without_a_room_is_refused(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"model": "default", "prompt": "a"}),
        ):
            answer = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
            assert answer.status_code == 400
            assert "bootstrap_room is missing" in answer.text
    room = {"bootstrap_room": 5}
    answer = httpx.post(
        f"{pair.decode.url}/generate", json={"text": "a", **room}, timeout=PATIENCE_S
    )
    assert answer.status_code == 400
    assert "bootstrap_host is missing" in answer.text


def test_the_fake_host_needs_no_other_server(pair: Pair) -> None:
    body = {
        "text": TEXT,
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": 0,
    }
    assert pair.decode.generate(**body)["meta_info"]["completion_tokens"] == 5
    assert pair.prefill.generate(**body)["meta_info"]["completion_tokens"] == 1


def test_the_bootstrap_server_speaks_sglangs_protocol(pair: Pair) -> None:
    url = f"http://{HOST}:{pair.port}"
    assert httpx.get(f"{url}/health").text == "OK"
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    info = httpx.get(f"{url}/route", params=dict.fromkeys(names, -1)).json()
    assert (info["attn_tp_size"], info["dp_size"], info["page_size"]) == (1, 1, 1)
    rank = httpx.get(f"{url}/route", params=dict.fromkeys(names, 0)).json()
    assert rank["rank_port"] > 0
    assert httpx.get(f"{url}/route", params=dict.fromkeys(names, 7)).status_code == 404
    body = {"rank_ip": HOST, "rank_port": 1, "system_dp_rank": 0}
    assert httpx.put(f"{url}/route", json=body).status_code == 403
    room = {"bootstrap_room": 9, "dp_rank": 0}
    assert httpx.post(f"{url}/register_dp_rank", json=room).status_code == 200
    asked = httpx.post(f"{url}/query_dp_ranks", json={"bootstrap_rooms": [9, 10]})
    assert asked.json() == {"9": 0, "10": 0}


def test_a_room_used_twice_is_refused_and_nothing_ends(pair: Pair, alone: ServerProcess) -> None:
    room = next(ROOMS) * 64
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": TEXT * 4, "sampling_params": greedy, **pair.in_room(room)}
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(
            httpx.post, f"{pair.prefill.url}/generate", json=body, timeout=PATIENCE_S
        )
        wait_until(lambda: pair.prefill.state()["num_queued"])
        second = httpx.post(f"{pair.prefill.url}/generate", json=body, timeout=PATIENCE_S)
        assert second.status_code == 400
        assert f"bootstrap_room {room} belongs to another request" in second.text
        decode = httpx.post(f"{pair.decode.url}/generate", json=body, timeout=PATIENCE_S)
        assert first.result().status_code == 200
    expected = alone.generate(text=TEXT * 4, sampling_params=greedy)
    assert decode.json()["output_ids"] == expected["output_ids"]


def test_a_prefill_that_was_aborted_holds_nobody_up(pair: Pair, alone: ServerProcess) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": TEXT * 5, "sampling_params": greedy, **pair.in_room()}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            httpx.post,
            f"{pair.prefill.url}/generate",
            json=body | {"rid": "gone"},
            timeout=PATIENCE_S,
        )
        wait_until(lambda: pair.prefill.state()["num_queued"])
        httpx.post(f"{pair.prefill.url}/abort_request", json={"rid": "gone"})
        first.result()
    failures = pair.failures()
    decode = httpx.post(f"{pair.decode.url}/generate", json=body, timeout=PATIENCE_S)
    expected = alone.generate(text=TEXT * 5, sampling_params=greedy)
    assert decode.json()["output_ids"] == expected["output_ids"]
    assert pair.failures() == failures + 1
    assert "aborted on the prefill server" in pair.decode.errors


def test_strangers_at_the_transfer_port(pair: Pair) -> None:
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    url = f"http://{HOST}:{pair.port}/route"
    port = httpx.get(url, params=dict.fromkeys(names, 0)).json()["rank_port"]
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b""):
        with socket.create_connection((HOST, port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(data)
    greedy = {"temperature": 0, "max_new_tokens": 2}
    failures = pair.failures()
    pair.generate(text="still here", sampling_params=greedy)
    assert pair.failures() == failures


def test_loads_and_info_show_the_mode(pair: Pair) -> None:
    for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
        assert info["disaggregation_mode"] == mode
        model = httpx.get(f"{server.url}/model_info", timeout=PATIENCE_S).json()
        assert model["disaggregation_mode"] == mode
        (load,) = httpx.get(f"{server.url}/v1/loads", timeout=PATIENCE_S).json()["loads"]
        assert load["disaggregation"]["mode"] == mode
    assert "#inflight-req:" in pair.prefill.errors
    assert "#bootstrap-req:" in pair.prefill.errors


@pytest.mark.full
def test_servers_of_other_numbers_of_ranks_do_not_share(
    tiny_model: Path, tmp_path: Path, pair: Pair, alone: ServerProcess
) -> None:
    options = (*base(tiny_model), "--disaggregation-enable-kv-checksum", "--tp-size", "2")
    with running_server(tmp_path, *options, "--disaggregation-mode", "decode") as decode:
        unequal = Pair(pair.prefill, decode, pair.port)
        greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": TEXT, "sampling_params": greedy, **unequal.in_room()}
        answer = httpx.post(f"{decode.url}/generate", json=body, timeout=PATIENCE_S)
        expected = alone.generate(text=TEXT, sampling_params=greedy)
        assert answer.json()["output_ids"] == expected["output_ids"]
        assert unequal.failures() == 1
        assert "1 engines of 1 ranks" in decode.errors or "--tp-size" in decode.errors


def test_nothing_is_left_behind(pair: Pair) -> None:
    """The last of the tests that share the pair."""
    wait_until(pair.is_idle)


@pytest.mark.full
def test_servers_of_two_ranks_give_the_tokens_of_one(
    tiny_model: Path, tmp_path: Path, alone: ServerProcess
) -> None:
    """Each rank moves its own part of the keys and values."""
    with pair_of(tiny_model, tmp_path, "--tp-size", "2") as pair:
        for name in ("greedy", "sampled", "one token", "regex"):
            sampling = {"max_new_tokens": 24, "ignore_eos": True, **CASES[name]}
            for length in (1, 700):
                text = (TEXT * 20)[:length]
                expected = alone.generate(text=text, sampling_params=sampling)
                found = pair.generate(text=text, sampling_params=sampling)
                assert found["output_ids"] == expected["output_ids"], (name, length)
        assert pair.failures() == 0
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        url = f"http://{HOST}:{pair.port}/route"
        ports = set()
        for rank in (0, 1):
            of_rank = dict.fromkeys(names, 0) | {"target_tp_rank": rank}
            ports.add(httpx.get(url, params=of_rank).json()["rank_port"])
        assert len(ports) == 2
        wait_until(pair.is_idle)


@pytest.mark.full
def test_recordings_of_both_servers_are_replayed(tiny_model: Path, tmp_path: Path) -> None:
    port, common = free_port(), (*base(tiny_model), "--record-content", "on")
    paths = [tmp_path / "prefill.rec", tmp_path / "decode.rec"]
    own = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running_server(tmp_path / "p", *common, *own, "--record", str(paths[0])) as prefill,
        running_server(
            tmp_path / "d",
            *(*common, "--disaggregation-mode", "decode", "--record", str(paths[1])),
        ) as decode,
    ):
        pair = Pair(prefill, decode, port)
        for name in ("greedy", "sampled", "one token", "stop", "regex"):
            for length in (1, 700):
                sampling = {"max_new_tokens": 24, "ignore_eos": True, **CASES[name]}
                pair.generate(text=(TEXT * 20)[:length], sampling_params=sampling)
        greedy = {"temperature": 0, "max_new_tokens": 4}
        body = {"text": TEXT, "sampling_params": greedy, **pair.in_room()}
        with announced(HOST, 1, bytes(32)):  # nobody is there: it is computed by decode
            httpx.post(
                f"{decode.url}/generate", json=body | {"bootstrap_port": 1}, timeout=PATIENCE_S
            )
        assert pair.failures() == 1
        wait_until(pair.is_idle)
    for path in paths:
        done = replay(path)
        assert " 0 differing plans" in done.stdout, done.stdout + done.stderr


def same_answers(decode: ServerProcess, alone: ServerProcess, text: str) -> None:
    """OpenAI's client gets from a decode server what it gets from one server."""
    with (
        openai.OpenAI(base_url=f"{decode.url}/v1", api_key="secret") as ours,
        openai.OpenAI(base_url=f"{alone.url}/v1", api_key="none") as theirs,
    ):
        completion: dict[str, Any] = {"model": "default", "prompt": text, "max_tokens": 12}
        for more in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4, "n": 2}):
            found, expected = (
                [choice.text for choice in each.completions.create(**completion, **more).choices]
                for each in (ours, theirs)
            )
            assert found == expected
        messages = [{"role": "user", "content": text}]
        chat: dict[str, Any] = {"model": "default", "messages": messages, "temperature": 0}
        streamed = ours.chat.completions.create(
            **chat, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        pieces = [each.choices[0].delta.content or "" for each in streamed if each.choices]
        whole = theirs.chat.completions.create(**chat, max_tokens=12)
        assert "".join(pieces) == whole.choices[0].message.content


def test_a_pair_without_a_router(tiny_model: Path, tmp_path: Path, alone: ServerProcess) -> None:
    """Clients talk to the decode server alone; they do not notice when the prefill server dies."""
    port, common = free_port(), (*base(tiny_model), "--api-key", "secret")
    own = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running_server(tmp_path / "p", *common, *own) as prefill,
        running_server(
            tmp_path / "d",
            *(*common, "--disaggregation-mode", "decode"),
            *("--disaggregation-prefill-servers", prefill.url),
        ) as decode,
    ):
        wait_until(lambda: "Prompts are computed by the prefill server" in decode.errors)

        def num_moved() -> float:
            return metric(decode, "sglang:kv_transfer_total_mb_count", api_key="secret")

        same_answers(decode, alone, TEXT * 3)
        wait_until(lambda: num_moved() == 4)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.wait_end()
        same_answers(decode, alone, f"Alone: {TEXT}")
        same_answers(decode, alone, f"Still alone: {TEXT}")
        assert num_moved() == 4
        assert "No prefill server answers" in decode.errors
        assert metric(decode, "setpoint:prefill_server_up", api_key="secret") == 0
        name = "setpoint:prompts_without_prefill_server_total"
        assert metric(decode, name, api_key="secret") >= 1


def streams(pair: Pair, number: int, answers: list[Any]) -> list[threading.Thread]:
    """Requests on both servers; the decode server's answers are appended."""
    greedy = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}

    def run(index: int) -> None:
        body = {"text": f"{index} {TEXT * 8}", "sampling_params": greedy, **pair.in_room()}

        def ask_prefill() -> None:
            with suppress(httpx.HTTPError):  # it may be killed
                httpx.post(f"{pair.prefill.url}/generate", json=body, timeout=PATIENCE_S)

        other = threading.Thread(target=ask_prefill)
        other.start()
        answers.append(
            (index, httpx.post(f"{pair.decode.url}/generate", json=body, timeout=PATIENCE_S))
        )
        other.join()

    found = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for each in found:
        each.start()
    return found


@pytest.mark.full
@pytest.mark.parametrize("who", ["prefill engine", "prefill server", "decode engine"])
def test_a_death_under_load_loses_no_request(
    tiny_model: Path, tmp_path: Path, alone: ServerProcess, who: str
) -> None:
    with pair_of(tiny_model, tmp_path) as pair:
        answers: list[Any] = []
        threads = streams(pair, 24, answers)
        wait_until(lambda: answers or metric(pair.decode, "sglang:kv_transfer_total_mb_count") > 2)
        if who == "prefill server":
            os.kill(engine_of(pair.prefill.process.pid).pid, signal.SIGKILL)
            pair.prefill.process.kill()
        else:
            server = pair.prefill if who == "prefill engine" else pair.decode
            os.kill(engine_of(server.process.pid).pid, signal.SIGKILL)
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert len(answers) == 24
        greedy = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        for index, answer in answers:
            assert answer.status_code == 200, answer.text
            expected = alone.generate(text=f"{index} {TEXT * 8}", sampling_params=greedy)
            assert answer.json()["output_ids"] == expected["output_ids"]


@pytest.mark.full
def test_servers_of_other_dtypes_do_not_share(
    tiny_model: Path, tmp_path: Path, alone: ServerProcess
) -> None:
    with pair_of(tiny_model, tmp_path, decode=("--kv-cache-dtype", "bfloat16")) as pair:
        greedy = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"text": TEXT, "sampling_params": greedy, **pair.in_room()}
        answer = httpx.post(f"{pair.decode.url}/generate", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200
        assert pair.failures() == 1
        for server in (pair.prefill, pair.decode):
            assert "--kv-cache-dtype is float32 on the prefill server" in server.errors
