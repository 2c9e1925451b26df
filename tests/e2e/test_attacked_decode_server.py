"""A decode server whose client names a prefill server of its own: what is refused, what is computed,
what is cached."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engine_of,
    free_port,
    running_server,
    wait_until,
)

HOST = "127.0.0.1"
TEXT = "A prompt that many clients have. " * 8
MOVED = "sglang:kv_transfer_total_mb_count"
FAILED = "sglang:num_transfer_failed_reqs_total"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@contextmanager
def attacker(port: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """A bootstrap server that claims everything; its port, and what it was asked."""
    seen: list[bytes] = []
    answers = {
        "attn_tp_size": 1,
        "dp_size": 1,
        "page_size": 1,
        "kv_cache_dtype": "auto",
        "rank_ip": HOST,
    }
    with socket.create_server((HOST, port)) as listener:
        own = listener.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock, suppress(OSError):
                    seen.append(sock.recv(1 << 16))
                    body = json.dumps(answers | {"rank_port": own}).encode()
                    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                    sock.sendall(head + body)

        threading.Thread(target=serve, daemon=True).start()
        yield own, seen
        listener.shutdown(socket.SHUT_RDWR)


def metric(server: ServerProcess, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def ask(server: ServerProcess, path: str = "/generate", **fields: Any) -> httpx.Response:
    body = {"text": TEXT, "prompt": TEXT, "max_tokens": 4, "model": "default"}
    body["messages"] = [{"role": "user", "content": TEXT}]  # type: ignore[assignment]
    wanted = {"/generate": ("text",), "/v1/completions": ("prompt", "max_tokens", "model")}
    names = wanted.get(path, ("messages", "max_tokens", "model"))
    sent = {name: body[name] for name in names} | fields
    if path == "/generate":
        sent["sampling_params"] = GREEDY
    answer = httpx.post(server.url + path, json=sent, timeout=PATIENCE_S)
    shown = {name: value for name, value in fields.items() if not name.endswith("room")}
    words = answer.json()["error"]["message"] if answer.status_code == 400 else ""
    print(f"{path} {json.dumps(shown)}: {answer.status_code} {words}")
    return answer


def refuses_strangers(server: ServerProcess, port: int) -> None:
    room = {"bootstrap_room": 1 << 40}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        answer = ask(server, path, bootstrap_host=HOST, bootstrap_port=port, **room)
        assert answer.status_code == 400
        assert "--disaggregation-prefill-servers" in answer.text
    for named in (
        {"bootstrap_host": "169.254.169.254", "bootstrap_port": 80},
        {"bootstrap_host": ["localhost"], "bootstrap_port": [port]},
        {"bootstrap_host": HOST},  # at the bootstrap port of this server's own options
        {"bootstrap_host": "prefill.example"},
    ):
        assert ask(server, **named, **room).status_code == 400
    header = {"x-override-bootstrap-host": HOST, "x-override-bootstrap-port": str(port)}
    answer = httpx.post(
        f"{server.url}/generate",
        json={"text": TEXT, "sampling_params": GREEDY},
        headers=header | {"x-override-bootstrap-room": "7"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 400, answer.text


def nothing_is_cached(told: ServerProcess) -> None:
    """The first proper request finds no token of its prompt, the second one all."""
    first = ask(told).json()
    print("the next client:", first["meta_info"]["cached_tokens"], "cached tokens")
    assert first["meta_info"]["cached_tokens"] == 0
    wait_until(lambda: metric(told, MOVED) == 1)
    again = ask(told).json()
    assert again["meta_info"]["cached_tokens"] > 0
    assert again["output_ids"] == first["output_ids"]


def a_router_may_name(prefill: ServerProcess, untold: ServerProcess, room: dict[str, Any]) -> None:
    """The true prefill server, which the decode server knows by itself."""
    answers: list[httpx.Response] = []
    sides = [
        threading.Thread(target=lambda server=server: answers.append(ask(server, **room)))
        for server in (prefill, untold)
    ]
    for each in sides:
        each.start()
    for each in sides:
        each.join(PATIENCE_S)
    assert [each.status_code for each in answers] == [200, 200]
    wait_until(lambda: metric(untold, MOVED) == 1)


def takes_the_port_over(
    told: ServerProcess, untold: ServerProcess, room: dict[str, Any], port: int
) -> None:
    """The prefill server was killed."""
    with attacker(port) as (_, heard):
        assert ask(untold, **room).status_code == 400
        failed = metric(told, FAILED)
        body = {"text": f"Another prompt. {TEXT}", "sampling_params": GREEDY}
        named = room | {"bootstrap_host": HOST}
        found = httpx.post(f"{told.url}/generate", json=body | named, timeout=PATIENCE_S)
        assert found.status_code == 200, found.text
        wait_until(lambda: metric(told, FAILED) == failed + 1)
        lines = [each for each in told.errors.splitlines() if "was not handed over" in each]
        assert lines
        print("after the port was taken over:", lines[0])
        fake = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
        alone = httpx.post(f"{untold.url}/generate", json=body | fake, timeout=PATIENCE_S)
        assert found.json()["output_ids"] == alone.json()["output_ids"]
        assert not heard, "somebody has connected to the attacker"


@pytest.mark.full
def test_a_client_chooses_no_prefill_server(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: the decode server asked the client's server, and took what it sent for the prompt
    of everybody."""
    port = free_port()
    common = ("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1")
    common = (*common, "--enable-metrics", "--enable-cache-report")
    prefill_options = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port")
    decode_options = (*common, "--disaggregation-mode", "decode")
    env = {"SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1"}
    with (
        attacker() as (own_port, seen),
        running_server(tmp_path / "p", *common, *prefill_options, str(port)) as prefill,
        running_server(
            tmp_path / "d",
            *(*decode_options, "--disaggregation-prefill-servers", prefill.url),
            env=env,
        ) as told,
        running_server(tmp_path / "e", *decode_options, env=env) as untold,
    ):
        wait_until(lambda: "Prompts are computed by the prefill server" in told.errors)
        for server in (told, untold):
            refuses_strangers(server, own_port)
        for named in ({"bootstrap_port": own_port}, {"disagg_prefill_dp_rank": 0}):
            assert ask(told, **named).status_code == 400
        assert not seen, "somebody has connected to the attacker"
        nothing_is_cached(told)
        room = {"bootstrap_host": "localhost", "bootstrap_port": port, "bootstrap_room": 1 << 41}
        a_router_may_name(prefill, untold, room)
        os.kill(engine_of(prefill.process.pid).pid, signal.SIGKILL)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.wait_end()
        takes_the_port_over(told, untold, room, port)
