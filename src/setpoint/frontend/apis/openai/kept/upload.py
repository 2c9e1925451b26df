"""Reads an upload (``multipart/form-data``) into the store, piece by piece as it arrives.
python-multipart parses the form; this module knows the fields of ``/v1/files`` and the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.apis.openai.kept.fields import expiry_seconds
from setpoint.frontend.storage.batches import BATCH_PURPOSE
from setpoint.frontend.storage.files import StoredFile, Upload, UploadStore

PURPOSES = ("assistants", BATCH_PURPOSE, "evals", "fine-tune", "user_data", "vision")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARS = 255
_WRITE_BYTES = 1 << 18


async def receive_file(request: Request, store: UploadStore) -> StoredFile:
    """Store an upload and return the file. Raises RequestError: 400 for an invalid form, 413 for a
    file that is too large, and the errors of the store."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestError(
            "Upload the file as multipart/form-data with the fields purpose and file (with curl: -F"
            " purpose=batch -F file=@requests.jsonl)."
        )
    with store.upload() as upload:
        form = _Form()
        try:
            parser = MultipartParser(options[b"boundary"], form.callbacks())
            async for chunk in request.stream():
                # In a thread, because content that resembles boundaries takes long to parse.
                await asyncio.to_thread(parser.write, chunk)
                await form.store(upload, at_least=_WRITE_BYTES)
            parser.finalize()
        except FormParserError as error:
            raise RequestError(f"The form is not valid multipart/form-data: {error}") from None
        await form.store(upload, at_least=1)
        form.check(upload)
        return await upload.finish(
            filename=form.filename or "", purpose=form.purpose, expires_after_s=form.expires_after_s
        )


class _Form:
    """Collects the parts of a form that the parser reports."""

    def __init__(self) -> None:
        self.filename: str | None = None
        self._fields: dict[str, bytearray] = {}
        self._name = ""
        """Name of the part that is being read."""
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._content = bytearray()
        """Bytes of the file that have arrived but are not written yet."""
        self._is_complete = False

    def callbacks(self) -> Any:
        def collect(into: bytearray) -> Callable[[bytes, int, int], None]:
            return lambda data, start, end: into.extend(data[start:end])

        return {
            "on_header_field": collect(self._header),
            "on_header_value": collect(self._value),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": self._add,
            "on_end": self._end,
        }

    @property
    def purpose(self) -> str:
        return self._text("purpose")

    @property
    def expires_after_s(self) -> int | None:
        return expiry_seconds(
            {
                key: int(text) if text.isdecimal() else text
                for key in ("anchor", "seconds")
                if (text := self._text(f"expires_after[{key}]"))
            },
            "expires_after",
        )

    async def store(self, upload: Upload, *, at_least: int) -> None:
        if len(self._content) >= at_least:
            data = bytes(self._content)
            self._content.clear()
            await upload.write(data)

    def check(self, upload: Upload) -> None:
        """Raise RequestError (400) for a form that is incomplete or lacks a field."""
        if not self._is_complete:
            raise RequestError("The form is incomplete; its last part has no end.")
        if self.filename is None:
            raise RequestError("file is missing; add a part with that name to the form.")
        if not upload.num_bytes:
            raise RequestError("file is empty.")
        if self.purpose not in PURPOSES:
            got = f"; got {quoted(self.purpose, 64)}" if self.purpose else ""
            raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}{got}.")

    def _text(self, name: str) -> str:
        return self._fields.get(name, b"").decode(errors="replace")

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name in self._fields or (self._name == "file" and self.filename is not None):
            raise RequestError(f"The form has two parts with the name {self._name}.")
        if self._name in _FIELDS:
            self._fields[self._name] = bytearray()
            return
        if self._name != "file":
            known = ", ".join(("file", *_FIELDS))
            raise RequestError(
                f"{quoted(self._name, 64)} is not a known field of the form; it may have {known}."
            )
        if b"filename" not in options:
            raise RequestError("file must be a file with a filename, not a text field.")
        self.filename = options[b"filename"].decode(errors="replace")
        if len(self.filename) > _MAX_NAME_CHARS or not self.filename.isprintable():
            raise RequestError(
                f"The name of the file must have at most {_MAX_NAME_CHARS} characters, all of them"
                " printable."
            )

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._content += data[start:end]
            return
        field = self._fields[self._name]
        field += data[start:end]
        if len(field) > _MAX_FIELD_BYTES:
            raise RequestError(f"{self._name} may have at most {_MAX_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        self._is_complete = True
