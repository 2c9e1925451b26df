"""SGLang's routes that this server does not support yet. Each answers 501 and says what is missing,
so that a client can distinguish it from a misspelt path."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.frontend.http.api_routes import Handler, Routes

ADAPTERS = "LoRA adapters"
LAYOUT = "the layout of another system's cache"
FROM_DISK = "weights from anywhere but a folder, which /update_weights_from_disk reads"
REMOTE = "loading weights from another server"
CORPORA = "speculation from a corpus of n-grams"
DECISIONS = "decisions between given answers; /v1/score gives the probabilities of single tokens"
MISSING = {
    "/load_lora_adapter": ADAPTERS,
    "/load_lora_adapter_from_tensors": ADAPTERS,
    "/unload_lora_adapter": ADAPTERS,
    "/get_hicache_l3_cache_layout": LAYOUT,
    "/update_weights_from_tensor": FROM_DISK,
    "/update_weights_from_distributed": FROM_DISK,
    "/update_weights_from_ipc": FROM_DISK,
    "/begin_weight_update": FROM_DISK,
    "/end_weight_update": FROM_DISK,
    "/init_weights_update_group": FROM_DISK,
    "/destroy_weights_update_group": FROM_DISK,
    "/init_weights_send_group_for_remote_instance": REMOTE,
    "/send_weights_to_remote_instance": REMOTE,
    "/get_remote_instance_transfer_engine_info": REMOTE,
    "/remote_instance_transfer_engine_info": REMOTE,
    "/get_weights_by_name": "reading single weights, which are stored repacked",
    "/weights_checker": "checks of weights",
    "/add_external_corpus": CORPORA,
    "/list_external_corpora": CORPORA,
    "/remove_external_corpus": CORPORA,
    "/pd_role_switch": "separate engines for prefill and decode",
    "/set_trace_level": "traces that change while it serves; start it with --enable-trace",
    "/slow_down": "a brake for tests",
    "/dumper/{method}": "dumps of tensors",
    "/v1/audio/transcriptions": "audio",
    "/v1/realtime": "audio",
    "/v1/decisions": DECISIONS,
    "/v1/systemone": DECISIONS,
    "/invocations": "the form of /v1/chat/completions that SageMaker expects",
    "/vertex_generate": "the form of /generate that Vertex AI expects",
}
"""Path -> what the server cannot do."""

_ANYBODYS = (
    *("/get_hicache_l3_cache_layout", "/get_remote_instance_transfer_engine_info"),
    *("/remote_instance_transfer_engine_info", "/list_external_corpora", "/invocations"),
    *("/vertex_generate", "/v1/"),
)
"""Prefixes of the paths that would change nothing for other clients."""
CONTROLS = tuple(path for path in MISSING if not path.startswith(_ANYBODYS))
"""Paths that would change the server for all its clients."""


def install_missing(routes: Routes) -> None:
    for path, what in MISSING.items():
        routes.add_hidden(path, _refusing(path, what), "GET", "POST", "PUT", "DELETE")


def _refusing(path: str, what: str) -> Handler:
    async def refuse(request: Request) -> Response:
        raise RequestError(
            f"{path} is not supported by this server yet. It lacks {what}.",
            status_code=501,
        )

    return refuse
