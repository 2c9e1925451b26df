"""SMG, the gateway that SGLang's router became."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc
import routers
from checks import URLS, asked, check, report
from smg.servicer import SglangGrpcServer

routers.LAUNCH += [str(Path(sys.executable).parent / "smg"), "launch"]

SUBSCRIBE = "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents"


@check("KV events: SMG's relay for gRPC passes on what the server publishes")
def kv_events() -> None:
    """Gateways read KV events from it. No scheduler is behind it here; the relay needs none."""
    info = asked("/server_info", url=URLS[1])["kv_events"]
    events, replay = (
        f"tcp://127.0.0.1:{info[key]}"
        for key in ("endpoint_port_base", "replay_endpoint_port_base")
    )
    address = f"127.0.0.1:{routers.free_port()}"
    ids = list(range(40, 72))
    ask = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert asked("/generate", ask, url=URLS[1])["meta_info"]["prompt_tokens"] == len(ids)
    server = SglangGrpcServer(
        address,
        f"ipc://{tempfile.mkdtemp()}",
        f"tcp://127.0.0.1:{routers.free_port()}",
        "m",
        kv_events_endpoint=events,
        kv_events_replay_endpoint=replay,
        kv_events_topic=info["topic"],
    )
    # A message's block with one token, 8 bits each: field 2 of KvBlock, packed.
    blocks = {b"\x12\x01" + bytes([token]) for token in ids}
    with grpc.insecure_channel(address) as channel:
        batches = channel.unary_stream(SUBSCRIBE)(b"", timeout=60)
        # It asks for what came before it subscribed once it has heard of something new.
        asked("/generate", ask | {"input_ids": [*ids, 99]}, url=URLS[1])
        while blocks:
            batch = next(batches)
            blocks = {each for each in blocks if each not in batch}
        batches.cancel()
    server.stop()


report()
