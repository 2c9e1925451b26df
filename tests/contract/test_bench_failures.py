"""``setpoint bench serving`` against servers that fail: each failure has a reason, and none counts as
throughput."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from bench_runs import measure

from setpoint import cli
from setpoint_testing.byte_tokenizer import write_byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path


CHUNK = (
    b'data: {"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 12,'
    b' "finish_reason": null}}\n\n'
)


@contextmanager
def broken(
    behaviour: Callable[[BaseHTTPRequestHandler], None],
    *,
    good: int = 0,
    says: bytes = b'{"data": [{"id": "m"}]}',
) -> Iterator[str]:
    """A server that answers ``good`` requests as it should and then behaves so; it ``says`` this to
    every question about itself."""
    left = [good]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(says)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if left[0] > 0:
                left[0] -= 1
                self.answer(
                    CHUNK.replace(b"null", b'{"type": "length"}') + b"data: [DONE]\n\n",
                    kind="text/event-stream",
                )
            else:
                behaviour(self)

        def answer(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_emulated_tiles_are_not_timed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = b'{"data": [{"id": "m"}], "kernel_level": "amx_emulated", "kernels_emulated": true}'
    with broken(errs, good=9, says=said) as url:
        code = cli.main(["bench", "serving", "--base-url", url, "--tokenizer", str(folder)])
    assert code != 0
    assert "amx_emulated, which exists for tests" in capsys.readouterr().err


def errs(handler: Any) -> None:
    handler.answer(b'{"error": {"message": "out of luck"}}', status=500)


def breaks(handler: Any) -> None:
    handler.answer(CHUNK, kind="text/event-stream")


def aborts(handler: Any) -> None:
    handler.answer(
        CHUNK.replace(b"null", b'{"type": "abort", "message": "killed"}'), kind="text/event-stream"
    )


def babbles(handler: Any) -> None:
    handler.answer(b"data: what?\n\n", kind="text/event-stream")


def is_no_http(handler: Any) -> None:
    handler.wfile.write(b"hello there\r\n\r\n")


def stalls(handler: Any) -> None:
    handler.answer(CHUNK, kind="text/event-stream")
    handler.wfile.flush()
    threading.Event().wait(3)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (errs, "status 500: out of luck"),
        (breaks, "the answer ended early"),
        (aborts, "aborted: killed"),
        (babbles, "the answer cannot be read: "),
        (is_no_http, "the answer is not HTTP"),
        (stalls, "nothing received for 0.8 s"),
    ],
)
def test_failures_have_a_reason_and_are_no_throughput(
    folder: Path, behaviour: Callable[[Any], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = ["--stall-timeout", "0.8" if behaviour is stalls else "60"]
    with broken(behaviour, good=3) as url:
        result = measure(
            folder, url, "--max-concurrency", "1", *patience, "--num-prompts", "4", code=3
        )
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 2, 2)
    ((said, count),) = result["failures"].items()
    assert said.startswith(reason)
    assert count == 2
    assert f"failed, 2 x: {reason}" in capsys.readouterr().out


def test_a_server_that_dies_in_the_middle(folder: Path) -> None:
    def dies(handler: Any) -> None:
        handler.server.socket.close()
        handler.connection.close()

    with broken(dies, good=3) as url:
        result = measure(folder, url, "--max-concurrency", "1", code=3)
    assert (result["completed"], result["failed"]) == (2, 4)
    assert any(reason.startswith("no connection") for reason in result["failures"])


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (
            ["--base-url", "http://127.0.0.1:9"],
            "There is no answer from http://127.0.0.1:9: no connection",
            1,
        ),
        (["--base-url", "ftp://x"], "--base-url must look like", 2),
        (["--backend", "trt"], "--backend must be one of", 2),
        (["--request-rate", "0"], "--request-rate must be above 0", 2),
        (["--goodput", "ttft"], "--goodput takes", 2),
        (["--extra-request-body", "[]"], "must be a JSON object", 2),
        (["--backend", "vllm-chat", "--tokenize-prompt"], "does not accept", 2),
        (["--output-details"], "name one with --output-file", 2),
        (["--compare", "/missing"], "--compare /missing cannot be read", 2),
        (["--output-file", "/missing/out"], "--output-file /missing/out cannot be written", 2),
        (["--plot", "/missing/run.svg"], "--plot /missing/run.svg cannot be written", 2),
        (["--page-size", "1"], "unknown option --page-size", 2),
        (["--gsp", "1"], "--gsp is ambiguous", 2),
        (["what"], "unexpected argument", 2),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serving", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_failed_warm_up_ends_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with broken(errs) as url:
        assert (
            cli.main(
                [
                    "bench",
                    "serving",
                    "--base-url",
                    url,
                    "--tokenizer",
                    str(folder),
                    "--num-prompts",
                    "2",
                ]
            )
            == 1
        )
    assert "The warm-up of" in capsys.readouterr().err
