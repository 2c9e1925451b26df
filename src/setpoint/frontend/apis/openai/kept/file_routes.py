"""Implements ``/v1/files``: uploads, lists, returns and deletes files."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from setpoint.frontend.apis.openai.kept.fields import page
from setpoint.frontend.apis.openai.kept.upload import receive_file
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.openapi import add_route
from setpoint.frontend.storage.files import StoredFile
from setpoint.frontend.storage.storage import Storage, require_storage

ROUTE = "/v1/files"
_MOST = 10_000


class FileRoutes:
    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage

    def install(self, router: APIRouter) -> None:
        one = ROUTE + "/{file_id}"
        add_route(router, ROUTE, self.upload, "POST")
        add_route(router, ROUTE, self.files, "GET", "HEAD")
        add_route(router, one, self.file, "GET", "HEAD")
        add_route(router, one + "/content", self.content, "GET", "HEAD")
        add_route(router, one, self.delete, "DELETE")

    async def upload(self, request: Request) -> Response:
        return json_response(
            _file_object(await receive_file(request, require_storage(self._storage).files))
        )

    async def files(
        self,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = _MOST,
        order: str = "desc",
    ) -> Response:
        files = [
            file
            for file in require_storage(self._storage).files.listing()
            if purpose in (None, file.purpose)
        ]
        return json_response(
            page(files, _file_object, after=after, limit=limit, most=_MOST, order=order)
        )

    async def file(self, file_id: str) -> Response:
        return json_response(_file_object(require_storage(self._storage).files.get(file_id)))

    async def content(self, file_id: str) -> Response:
        store = require_storage(self._storage).files
        # The type must never be one that a browser would show as a page of this server.
        return FileResponse(
            store.path(store.get(file_id).id),
            media_type="application/octet-stream",
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, file_id: str) -> Response:
        require_storage(self._storage).files.delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def _file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
