"""The objects in ``deploy/kubernetes``: valid by the schemas of Kubernetes, consistent with each other,
with the image and with the server's options and series. ``tests/e2e/test_kubernetes_pod.py`` runs them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.launch.deadline import END_S
from setpoint.observe.catalogue import SERIES
from setpoint.observe.series import Kind

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.37")
"""The oldest and the newest version that the objects are checked for."""

POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"additionalProperties": {"type": "string"}}},
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
                        },
                    },
                },
            },
        },
    },
}
"""What of the Prometheus operator's PodMonitor is used here (version 0.93 of its API)."""


def documents(folder: str) -> list[dict[str, Any]]:
    """The objects that the kustomization of a folder names, those of the folders below it too."""
    named = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
    found = []
    for name in named["resources"]:
        if (KUBERNETES / folder / name).is_dir():
            found += documents(str(Path(folder) / name))
        else:
            found += yaml.safe_load_all((KUBERNETES / folder / name).read_text())
    return found


def kind(name: str) -> dict[str, Any]:
    (found,) = (each for each in documents("autoscaled") if each["kind"] == name)
    return found


def pod() -> dict[str, Any]:
    return dict(kind("Deployment")["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def check(document: dict[str, Any], version: str) -> None:
    """Raise ValidationError if Kubernetes would refuse the object, or would ignore a part of it."""
    if document["kind"] == "PodMonitor":
        jsonschema.validate(document, POD_MONITOR)
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    found = documents("autoscaled")
    assert [each["kind"] for each in found] == [
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "PodMonitor",
        "HorizontalPodAutoscaler",
    ]
    for document in found:
        check(document, version)


def test_an_object_with_a_wrong_key_is_not_valid() -> None:
    """The check is one: a key that is misspelt anywhere is found."""
    for document in documents("autoscaled"):
        wrong = copy.deepcopy(document)
        wrong["spec"]["selectors"] = {}
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, VERSIONS[-1])


def test_every_file_is_named() -> None:
    """Nothing lies there that no kustomization applies, other than the adapter's values."""
    for folder in ("base", "autoscaled"):
        named = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        there = {each.name for each in (KUBERNETES / folder).iterdir()}
        assert there - {"kustomization.yaml", "adapter-rules.yaml"} == {*named["resources"]} - {
            "../base"
        }


def test_kustomize_renders_the_same() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    for folder in ("base", "autoscaled"):
        done = subprocess.run(
            ["kubectl", "kustomize", str(KUBERNETES / folder)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        rendered = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
        assert rendered == {each["kind"]: each for each in documents(folder)}


def test_the_objects_name_each_other() -> None:
    template = kind("Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    selectors = [
        kind("Deployment")["spec"]["selector"]["matchLabels"],
        kind("Service")["spec"]["selector"],
        kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        kind("PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    ports = {each["name"] for each in container()["ports"]}
    named = {each["targetPort"] for each in kind("Service")["spec"]["ports"]}
    named |= {each["port"] for each in kind("PodMonitor")["spec"]["podMetricsEndpoints"]}
    named |= {container()[f"{each}Probe"]["httpGet"]["port"] for each in ("startup", "liveness")}
    assert named == ports == {"http"}
    target = kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "setpoint")
    assert "replicas" not in kind("Deployment")["spec"], "an apply would undo the autoscaler's work"
    secret = container()["env"][0]["valueFrom"]["secretKeyRef"]
    command = f"create secret generic {secret['name']} --from-literal={secret['key']}="
    assert command in (KUBERNETES / "README.md").read_text()


def test_the_autoscaler_reads_what_the_adapter_makes_of_our_series() -> None:
    rules = yaml.safe_load((KUBERNETES / "autoscaled/adapter-rules.yaml").read_text())
    made = {each["name"]["as"]: each for each in rules["rules"]["custom"]}
    wanted = [each["pods"]["metric"] for each in kind("HorizontalPodAutoscaler")["spec"]["metrics"]]
    assert {each["name"] for each in wanted} == made.keys()
    gauges = {each.name for each in SERIES if each.kind is Kind.GAUGE}
    page = (KUBERNETES / "README.md").read_text()
    for name, rule in made.items():
        series = rule["seriesQuery"].partition("{")[0]
        assert series in gauges
        assert f"| `{name}` | `{series}`, " in page


def entrypoint() -> list[str]:
    text = (DEPLOY / "Containerfile").read_text()
    return list(json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)[0]))


def test_the_command_line_is_one_and_no_kubelet_kills_a_server_that_drains() -> None:
    options = parse(COMMANDS["serve"], [*entrypoint()[2:], *container()["args"]]).options
    assert options.metrics.enable_metrics
    assert options.server.port == container()["ports"][0]["containerPort"]
    assert options.server.api_key == "$(API_KEY)"
    (sleep, seconds) = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    needed = float(seconds) + options.server.drain_timeout + END_S
    assert pod()["terminationGracePeriodSeconds"] >= needed + 5


def test_probes_ask_for_the_state_that_they_stand_for() -> None:
    paths = {
        each: container()[f"{each}Probe"]["httpGet"]["path"]
        for each in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    # An engine that is started again makes /health say 503 for as long as a start takes.
    liveness = container()["livenessProbe"]
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 120


def test_a_server_has_no_rights_and_writes_to_volumes_only() -> None:
    rights = container()["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    user = pod()["securityContext"]
    text = (DEPLOY / "Containerfile").read_text()
    assert f"\nUSER {user['runAsUser']}:{user['runAsGroup']}\n" in text
    assert user["runAsNonRoot"]
    mounts = {each["mountPath"]: each["name"] for each in container()["volumeMounts"]}
    assert {each["name"] for each in pod()["volumes"]} == {*mounts.values()}
    for written in re.findall(r"(?:XDG_CACHE_HOME|HF_HOME)=(\S+)", text):
        assert any(written == mount or written.startswith(f"{mount}/") for mount in mounts)
    assert "/tmp" in mounts


def test_the_server_sees_the_limits_that_it_sizes_itself_by() -> None:
    """A request alone shows nothing inside a container; a limit does."""
    resources = container()["resources"]
    assert resources["limits"].keys() == {"cpu", "memory"}
    assert resources["requests"] == resources["limits"]
