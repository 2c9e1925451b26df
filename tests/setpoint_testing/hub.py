"""A hub on this machine: one repository, served as huggingface_hub asks for it (HF_ENDPOINT)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class Hub:
    """The repository ``name`` with one commit. ``files``: path -> content, or the size of a file
    whose content nobody may ask for."""

    def __init__(self, name: str, files: Mapping[str, bytes | int]) -> None:
        self.name = name
        self.files = files
        self.requests: list[str] = []
        """Every request so far: method and path."""
        self.url = ""

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in order."""
        resolve = f"GET /{self.name}/resolve/{COMMIT}/"
        return [each.removeprefix(resolve) for each in self.requests if each.startswith(resolve)]

    @contextmanager
    def running(self) -> Iterator[Hub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            api = f"/api/models/{hub.name}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                names = [{"rfilename": name} for name in hub.files]
                self._send(json.dumps({"id": hub.name, "sha": COMMIT, "siblings": names}))
            elif path.startswith(f"{api}/tree/"):
                self._send(json.dumps([_entry(name, file) for name, file in hub.files.items()]))
            elif path.startswith(f"/{hub.name}/resolve/{COMMIT}/"):
                self._file(path.removeprefix(f"/{hub.name}/resolve/{COMMIT}/"))
            else:
                self._send("{}", status=404)

        def _file(self, name: str) -> None:
            content = hub.files.get(name)
            if isinstance(content, bytes):
                self._send(content, ETag=f'"{_digest(content)}"')
            else:
                self._send("{}", status=404)

        def _send(self, content: str | bytes, *, status: int = 200, **headers: str) -> None:
            data = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    return Handler


def _entry(name: str, content: bytes | int) -> dict[str, object]:
    if isinstance(content, bytes):
        return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
    lfs = {"oid": "f" * 64, "size": content, "pointerSize": 135}
    return {"type": "file", "path": name, "size": content, "oid": "f" * 40, "lfs": lfs}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
