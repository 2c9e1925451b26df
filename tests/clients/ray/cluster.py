"""A Ray of one machine with Setpoint on Ray Serve, told what to do by JSON lines on its standard
input; answers each with a JSON line that begins with ``=>``. It runs in Ray's own environment.

    {"deploy": {arguments of the application}}   returns when the application is ready
    {"replicas": {}}                             the number of running replicas
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RAY_COLOR_PREFIX"] = "0"

import ray
from ray import serve

from rayserve.app import app


def deploy(arguments: dict[str, Any]) -> str:
    serve.run(app(arguments), route_prefix="/")
    return "ready"


def replicas(_: dict[str, Any]) -> int:
    deployment = serve.status().applications["default"].deployments["Replica"]
    return int(deployment.replica_states.get("RUNNING", 0))


COMMANDS = {"deploy": deploy, "replicas": replicas}


def main() -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        print("\n=>", json.dumps(COMMANDS[name](argument)), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
