"""An OpenAI-like HTTP server that misbehaves in the way that the name of the requested model says.
For tests of clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "secret"


class _Handler(BaseHTTPRequestHandler):
    gone: threading.Event
    """Set when the client hangs up in the middle of an answer."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self.answer(401, {"error": "Unauthorized"})
        else:
            self.answer(200, {"object": "list", "data": [{"id": "first"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match body["model"]:
            case "refuses":
                self.answer(400, {"error": {"message": "No."}})
            case "evil":
                self.stream(
                    {
                        "choices": [
                            {
                                "delta": {"content": "\x1b]0;title\x07\x9b31m ok\rA"},
                                "finish_reason": "stop",
                            }
                        ]
                    },
                    "[DONE]",
                )
            case "breaks":
                self.stream(
                    {"choices": [{"delta": {"content": "half"}}]},
                    {"error": {"message": "The engine died."}},
                )
            case "garbage":
                self.stream("<html>")
            case "stops":
                self.stream({"choices": [{"delta": {"content": "half"}}]})
            case "talks":
                try:
                    while True:
                        self.stream({"choices": [{"delta": {"content": "bla "}}]})
                        time.sleep(0.02)
                except OSError:
                    self.gone.set()

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *events: Any) -> None:
        if not hasattr(self, "started"):
            self.started = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
        for event in events:
            self.wfile.write(
                f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            )

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def misbehaving() -> Iterator[tuple[str, threading.Event]]:
    """Yields the server's base URL, and an event that is set when a client hangs up in the middle
    of an answer. The server requires :data:`KEY` as its API key."""
    gone = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gone": gone}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", gone
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
