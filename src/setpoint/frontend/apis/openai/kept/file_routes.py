"""Implements ``/v1/files``: uploads, lists, returns and deletes files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from setpoint.frontend.apis.openai.kept.fields import page
from setpoint.frontend.apis.openai.kept.upload import receive_file
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.http.queries import read_query
from setpoint.frontend.storage.files import StoredFile
from setpoint.frontend.storage.storage import Storage, require_storage

ROUTE = "/v1/files"
_MOST = 10_000


@dataclass(slots=True, frozen=True)
class FilesQuery:
    purpose: str | None = None
    after: str | None = None
    limit: int = _MOST
    order: str = "desc"


class FileRoutes:
    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage

    def install(self, routes: Routes) -> None:
        one = ROUTE + "/{file_id}"
        routes.add(ROUTE, self.upload, "POST")
        routes.add(ROUTE, self.files, "GET", "HEAD", query=FilesQuery)
        routes.add(one, self.file, "GET", "HEAD")
        routes.add(one + "/content", self.content, "GET", "HEAD")
        routes.add(one, self.delete, "DELETE")

    async def upload(self, request: Request) -> Response:
        return json_response(
            _file_object(await receive_file(request, require_storage(self._storage).files))
        )

    async def files(self, request: Request) -> Response:
        query = read_query(request, FilesQuery)
        files = [
            file
            for file in require_storage(self._storage).files.listing()
            if query.purpose in (None, file.purpose)
        ]
        return json_response(
            page(
                files,
                _file_object,
                after=query.after,
                limit=query.limit,
                most=_MOST,
                order=query.order,
            )
        )

    async def file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        return json_response(_file_object(require_storage(self._storage).files.get(file_id)))

    async def content(self, request: Request) -> Response:
        store = require_storage(self._storage).files
        # The type must never be one that a browser would show as a page of this server.
        return FileResponse(
            store.path(store.get(request.path_params["file_id"]).id),
            media_type="application/octet-stream",
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
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
