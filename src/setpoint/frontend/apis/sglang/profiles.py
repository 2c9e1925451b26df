"""Routes that trace the engine's steps, and ``/freeze_gc`` (docs/controls.md)."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from setpoint.core.bounds import Count
from setpoint.core.errors import RequestError
from setpoint.core.operations import FreezeGarbage, StartProfile, StopProfile
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.client_paths import check_path
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.participants import Participants
from setpoint.frontend.service import Service

START, STOP, FREEZE = "/start_profile", "/stop_profile", "/freeze_gc"
UNSUPPORTED = ("profile_by_stage", "profile_stages", "merge_profiles", "detailed_annotations")
WRITTEN_S = 60.0
"""How long the compression of a trace may take."""
POLL_S = 0.05
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}", re.ASCII)


class ProfileBody(msgspec.Struct):
    output_dir: str | None = None
    """A path relative to the server's folder for profiles, or an absolute path in it."""
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    start_step: Count | None = None
    activities: list[Literal["CPU", "GPU", "MEM"]] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None


class ProfileRoutes:
    def __init__(self, service: Service, bodies: ControlBodies) -> None:
        self._bodies = bodies
        self._engine = service.engine
        self._profiled = Participants(service.engine)
        self._folder = Path(service.config.profiles_folder)

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("control")
        routes.add(START, self.start, "GET", "POST", body=ProfileBody)
        routes.add(STOP, self.stop, "GET", "POST")
        routes.add(FREEZE, self.freeze, "POST")

    async def start(self, request: Request) -> Response:
        body = await self._bodies.read_if_any(request, ProfileBody, unsupported=UNSUPPORTED)
        activities = body.activities or ["CPU", "GPU"]
        operation = StartProfile(
            path=str(self._path(body)),
            start_step=body.start_step or 0,
            num_steps=body.num_steps,
            cpu="CPU" in activities or "MEM" in activities,
            gpu="GPU" in activities,
            memory="MEM" in activities,
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
        )
        (done, *_) = await self._profiled.begin(
            lambda line: line.operate(
                msgspec.structs.replace(operation, path=self._path_of(line.rank, operation.path))
            ),
            undo=lambda line: line.operate(StopProfile()),
        )
        return PlainTextResponse(f"Start profiling. The file will be {done.path}\n")

    def _path_of(self, rank: int, path: str) -> str:
        """The path for the profile of one engine, if there are several."""
        several = len(self._engine.lines) > 1
        return path.replace(".trace", f"-DP{rank}.trace") if several else path

    async def stop(self, request: Request) -> Response:
        losses = self._profiled.losses()
        (done, *_) = found = await self._profiled.on_all(lambda line: line.operate(StopProfile()))
        await self._written([Path(each.path) for each in found])
        return PlainTextResponse(f"Stop profiling. The file is {done.path}{losses}\n")

    async def _written(self, files: Sequence[Path]) -> None:
        """Wait until these files are there, which the engines write beside their work. Raises
        RequestError (503)."""
        for path in files:
            try:
                async with asyncio.timeout(WRITTEN_S):
                    while not await asyncio.to_thread(path.exists):
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise RequestError(
                    f"The profile has ended, and its file is not there after {WRITTEN_S:g} s:"
                    f" {path}. The log says why, if it cannot be written.",
                    status_code=503,
                ) from None

    async def freeze(self, request: Request) -> Response:
        await self._engine.on_all(lambda line: line.operate(FreezeGarbage()))
        gc.collect()
        gc.freeze()
        return PlainTextResponse("Garbage collection frozen.\n")

    def _path(self, body: ProfileBody) -> Path:
        """The file for which the body asks. Raises RequestError if its name has special characters,
        or if the file would not be in the server's folder."""
        base, wanted = self._folder.resolve(), body.output_dir or ""
        check_path(wanted, "output_dir")
        try:
            folder = (base / wanted).resolve()
            inside = folder.is_relative_to(base)
        except (OSError, RuntimeError):  # a loop of links
            inside = False
        if not inside:
            raise RequestError(
                f"output_dir must be {base} or a folder below it; SGLANG_TORCH_PROFILER_DIR sets"
                " that folder."
            )
        parts = []
        for key in ("profile_prefix", "profile_id"):
            value = getattr(body, key)
            if value is not None and not NAME.fullmatch(value):
                raise RequestError(
                    f"{key} must have at most 100 characters: letters, digits, dots, dashes and"
                    " underscores."
                )
            parts += [value] if value else []
        if body.profile_id is None:
            parts.append(f"{time.time():.6f}")
        return folder / f"{'-'.join(parts)}-TP-0.trace.json.gz"
