"""The request router of the replicas, with Ray Serve's interface. It weighs what a replica's cache
holds against the replica's load (``rayserve.choice``). It runs in the ingress, the only process
with a handle of the replicas."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rayserve.choice import Choice
from rayserve.prompts import Prompt

HELD = "held_prefixes"
"""The key under which a replica reports the hashes of the prefixes that its cache holds."""


class CacheAwareRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._choice = Choice()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas, each in a group of its own; Ray takes the first one that has room."""
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        self._choice.know(
            {name: each.routing_stats.get(HELD, b"") for name, each in replicas.items()}
        )
        prompts = _prompts(pending_request)
        order = self._choice.order(prompts)
        if pending_request is not None and prompts and order:
            # Count the request now: the replica of the next request in a burst is chosen before
            # this one is sent.
            request_id = pending_request.metadata.internal_request_id
            self._choice.sent(request_id, order[0], prompts)
            pending_request.future.add_done_callback(
                lambda future: self._choice.cancelled(request_id) if future.cancelled() else None
            )
        return [[replicas[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        request_id = pending_request.metadata.internal_request_id
        if prompts := _prompts(pending_request):
            self._choice.sent(request_id, replica_id.unique_id, prompts)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._choice.done(internal_request_id)


def _prompts(pending: PendingRequest | None) -> list[Prompt]:
    """The prompts in a call of ``Replica.http``. Other calls have none, and cost too little to be
    counted."""
    return [] if pending is None or len(pending.args) < 2 else list(pending.args[1])
