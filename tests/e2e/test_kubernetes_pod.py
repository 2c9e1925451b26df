"""A pod of ``deploy/kubernetes`` as a node would run it, without a cluster: the image's entry point with
the container's arguments, a read-only root, the volumes, the probes that a kubelet asks, and the end
that it gives a deleted pod. Between the two, what llm-d's endpoint picker asks of a model server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from setpoint.engine.kernels.cpu.build import cache_dir
from setpoint_testing.server_process import PATIENCE_S, free_port, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
PAGE = DEPLOY / "kubernetes/README.md"
SPEC: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes/base/deployment.yaml").read_text())[
    "spec"
]["template"]["spec"]
CONTAINER: dict[str, Any] = SPEC["containers"][0]
KEY = "a key of this test"
DRAIN_S = 300

READ_ONLY = """
set -e
mount --make-rprivate /
for volume in $VOLUMES; do mount --bind "$volume" "$volume"; done
while read -r _ _ _ _ at _; do
  case " /proc /sys /dev $VOLUMES " in *" $at "*) continue;; esac
  case "$at" in /proc/*|/sys/*|/dev/*) continue;; esac
  mount -o remount,bind,ro "$at"
done < /proc/self/mountinfo
exec "$@"
"""
"""Runs a command that can write to the folders in $VOLUMES only."""


def can_remount() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    command = ["unshare", "--mount", "mount", "--make-rprivate", "/"]
    return shutil.which("unshare") is not None and not subprocess.run(command, stderr=-3).returncode


class Pod:
    """One pod. Its container differs from the real one in the address, the model, where its volumes
    lie and how long requests may take to end: other tests keep this machine busy."""

    def __init__(self, folder: Path, model: Path) -> None:
        mounts = {each["mountPath"]: folder / each["name"] for each in CONTAINER["volumeMounts"]}
        for volume in mounts.values():
            volume.mkdir()
        image = (DEPLOY / "Containerfile").read_text()
        entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", image, re.M)[0])
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = [each.replace("$(API_KEY)", KEY) for each in CONTAINER["args"]]
        ours = ["--host", "127.0.0.1", "--port", str(self.port), "--model-path", str(model)]
        ours.append(f"--drain-timeout={DRAIN_S}")
        command = [sys.executable, "-m", "setpoint.cli", *entry[1:], *arguments, *ours]
        self.is_read_only = can_remount()
        if self.is_read_only:
            command = ["unshare", "--mount", "bash", "-c", READ_ONLY, "pod", *command]
        env = {**os.environ, "API_KEY": KEY, "TMPDIR": str(mounts["/tmp"])}
        env["VOLUMES"] = " ".join(map(str, mounts.values()))
        for name, path in re.findall(r"(XDG_CACHE_HOME|HF_HOME)=(\S+)", image):
            (mount,) = (each for each in mounts if path.startswith(each))
            env[name] = path.replace(mount, str(mounts[mount]))
        # As after the first start on a node: compiling takes minutes.
        if cache_dir().exists():
            shutil.copytree(cache_dir(), Path(env["XDG_CACHE_HOME"]) / "setpoint/kernels")
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        self.client = httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {KEY}"}
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def passes(self, probe: str) -> bool:
        """One try of a probe, as a kubelet judges it. (Its time limit is left out: this machine is
        busy with other tests.)"""
        asked = CONTAINER[f"{probe}Probe"]["httpGet"]
        assert asked["port"] == CONTAINER["ports"][0]["name"]
        try:
            answer = httpx.get(self.url + asked["path"], timeout=PATIENCE_S)
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    def gauges(self) -> dict[str, float]:
        """Name -> value of the gauges that have one sample, read without a key."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        return {
            family.name: family.samples[0].value
            for family in text_string_to_metric_families(text)
            if family.type == "gauge" and len(family.samples) == 1
        }

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def pod(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    pod = Pod(tmp_path_factory.mktemp("pod"), tiny_model)
    try:
        assert not pod.passes("startup"), "the server answered before it can have been ready"
        wait_until(
            lambda: pod.passes("startup") or pod.process.poll() is not None,
            timeout_s=4 * PATIENCE_S,
        )
        assert pod.process.poll() is None, pod.log
        yield pod
    finally:
        pod.end()


def test_a_pod_that_has_started_is_ready_and_alive(pod: Pod) -> None:
    assert pod.passes("readiness")
    assert pod.passes("liveness")
    assert pod.client.get("/v1/models").status_code == 200
    assert httpx.get(f"{pod.url}/v1/models", timeout=PATIENCE_S).status_code == 401


def test_it_can_write_to_its_volumes_only(pod: Pod) -> None:
    if not pod.is_read_only:
        pytest.skip("this machine lets no process have mounts of its own")
    lines = Path(f"/proc/{pod.process.pid}/mountinfo").read_text().splitlines()
    options = {line.split()[4]: line.split()[5].split(",") for line in lines}
    assert "ro" in options["/"]
    writable = {at for at in options if "rw" in options[at] and not re.match("/(proc|sys|dev)", at)}
    assert len(writable) == len(CONTAINER["volumeMounts"])
    assert "Read-only file system" not in pod.log
    of_machine = "Fallback: C++ kernels run at the level"  # where a better one is lacking
    warnings = [line for line in pod.log.splitlines() if "WARNING" in line]
    assert [line for line in warnings if of_machine not in line] == []


def picker() -> dict[str, str]:
    """What an endpoint picker is configured with: a name of its protocol -> our series."""
    ((plugin,),) = (
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)
        if "core-metrics-extractor" in block
    )
    (engine,) = plugin["parameters"]["engineConfigs"]
    label = SPEC_LABELS["llm-d.ai/engine-type"]
    assert engine.pop("name") == label, "the picker finds no entry for the label of the pods"
    return dict(engine)


SPEC_LABELS: dict[str, str] = yaml.safe_load(
    (DEPLOY / "kubernetes/base/deployment.yaml").read_text()
)["spec"]["template"]["metadata"]["labels"]


def test_the_protocol_of_model_servers_is_kept(pod: Pod) -> None:
    """https://llm-d.ai/docs/architecture/core/model-servers, read in November 2026."""
    names = picker()
    idle = pod.gauges()
    assert set(names.values()) <= idle.keys(), "each is a gauge with one value"
    assert idle[names["queuedRequestsSpec"]] == idle[names["runningRequestsSpec"]] == 0
    assert idle[names["kvUsageSpec"]] == 0
    pages = idle[names["cacheBlockSizeSpec"]] * idle[names["cacheNumBlocksSpec"]]
    assert pages == idle["sglang:max_total_num_tokens"]
    rows = PAGE.read_text()
    assert all(f"| `{name}` |" in rows for name in [*names.values(), "sglang:max_total_num_tokens"])

    served = pod.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": served, "prompt": "a", "max_tokens": 3000, "ignore_eos": True, "n": 128}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pod.client.post, "/v1/completions", json=body)
        busy: dict[str, float] = {}

        def shows_load() -> bool:
            assert not running.done(), "the load has ended before the figures showed it"
            busy.update(pod.gauges())
            return all(
                busy[names[each]] > 0
                for each in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")
            )

        wait_until(shows_load)
        assert busy[names["queuedRequestsSpec"]] + busy[names["runningRequestsSpec"]] <= 128
        assert busy[names["kvUsageSpec"]] <= 1
        assert pod.passes("liveness"), "a server with waiting requests is alive"
        pod.client.post("/abort_request", json={"abort_all": True})
        running.result()
    wait_until(lambda: pod.gauges()[names["runningRequestsSpec"]] == 0)

    chat = {"model": served, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    with pod.client.stream("POST", "/v1/chat/completions", json=chat) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] > 0
    assert pod.client.get("/health").status_code == 200


class Stream(threading.Thread):
    """Reads a stream of completions; ``chunks`` grows."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(daemon=True)
        self._pod = pod
        self.chunks: list[str] = []
        self.start()
        wait_until(lambda: len(self.chunks) > 3)

    def run(self) -> None:
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with self._pod.client.stream("POST", "/v1/completions", json=body) as response:
            self.chunks.extend(line for line in response.iter_lines() if line)


def test_a_deleted_pod_ends_its_stream_first(pod: Pod) -> None:
    """The last of this file: it ends the pod."""
    hook = subprocess.Popen(CONTAINER["lifecycle"]["preStop"]["exec"]["command"])
    body = {"prompt": "a", "max_tokens": 2}
    while hook.poll() is None:  # some clients still find it
        assert pod.client.post("/v1/completions", json=body).status_code == 200
        assert pod.passes("readiness")
    assert hook.returncode == 0
    stream = Stream(pod)
    pod.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not pod.passes("readiness"))
    wait_until(lambda: f"Draining: 1 request runs and has {DRAIN_S} s to end" in pod.log)
    stream.join(PATIENCE_S)
    assert stream.chunks[-1] == "data: [DONE]"
    reasons = re.findall(r'"finish_reason":"(\w+)"', "".join(stream.chunks))
    assert reasons == ["length"]
    assert pod.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in pod.log
