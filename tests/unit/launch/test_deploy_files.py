"""What ships in ``deploy/`` names what exists: series, options, files; and the tools that read it
accept it, where they are installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.launch.deadline import END_S
from setpoint.observe.catalogue import SERIES
from setpoint.observe.series import COMMON_LABELS, Kind

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
DASHBOARD = DEPLOY / "grafana/setpoint.json"


def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_queries_name_declared_series_and_their_labels() -> None:
    known = {}
    for series in SERIES:
        labels = {*COMMON_LABELS[series.scope], *series.labels}
        endings = ("_bucket", "_sum", "_count") if series.kind is Kind.HISTOGRAM else ("",)
        known |= {f"{series.shown_name}{ending}": labels for ending in endings}
    found = expressions()
    assert len(found) > 30
    for expression in found:
        uses = re.findall(r"((?:sglang|setpoint):\w+)(?:\{([^}]*)\})?", expression)
        assert uses or expression.startswith("up{"), expression
        for name, selectors in uses:
            assert name in known, expression
            assert set(re.findall(r"(\w+)=", selectors)) <= known[name], expression


def test_the_dashboard_has_a_panel_for_each_place() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_accepts_configuration_and_rules() -> None:
    promtool = tool("promtool")
    run(promtool, "check", "config", str(DEPLOY / "prometheus.yml"))
    run(promtool, "check", "rules", str(DEPLOY / "alerts.yml"))


def test_alerts_fire_for_what_they_say(tmp_path: Path) -> None:
    """Each alert on a series of its own making, and none on a healthy server."""
    promtool = tool("promtool")

    def on(alert: str, values: dict[str, str], *, fires: bool = True) -> dict[str, object]:
        series = [{"series": name, "values": made} for name, made in values.items()]
        return {
            "interval": "10s",
            "input_series": series,
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                    "eval_time": "40m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }

    who = 'instance="a",job="setpoint"'
    bucket = f"sglang:time_to_first_token_seconds_bucket{{{who},le="
    tests = [
        on("ServerDown", {f"up{{{who}}}": "0x240"}),
        on("EngineDown", {f"setpoint:engine_up{{{who}}}": "0x240"}),
        on("EngineDown", {f"setpoint:engine_up{{{who}}}": "1x240"}, fires=False),
        on("QueueGrows", {f"sglang:num_queue_reqs{{{who}}}": "10+10x240"}),
        on("QueueGrows", {f"sglang:num_queue_reqs{{{who}}}": "50x240"}, fires=False),
        on(
            "RequestsAreRetracted",
            {f"sglang:num_retracted_requests_total{{{who}}}": "0+2x240"},
        ),
        on(
            "PoolUnderusedWhileRequestsWait",
            {
                f"sglang:token_usage{{{who}}}": "0.5x240",
                f"sglang:num_queue_reqs{{{who}}}": "3x240",
            },
        ),
        on(
            "FirstTokensAreSlow",
            {
                f'{bucket}"10.0"}}': "0x240",
                f'{bucket}"20.0"}}': "0+1x240",
                f'{bucket}"+Inf"}}': "0+1x240",
            },
        ),
        on(
            "RequestsFail",
            {
                f'sglang:http_responses_total{{{who},status_code="500"}}': "0+1x240",
                f'sglang:http_responses_total{{{who},status_code="200"}}': "0+9x240",
            },
        ),
    ]
    path = tmp_path / "tests.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}),
        encoding="utf-8",
    )
    run(promtool, "test", "rules", str(path))


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    verify = tool("systemd-analyze")
    text = (DEPLOY / "setpoint.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(\S+) serve --config (\S+)$", text, re.M)
    assert command == ("/opt/setpoint/.venv/bin/setpoint", "${CREDENTIALS_DIRECTORY}/serve.yaml")
    unit = tmp_path / "setpoint.service"
    unit.write_text(text.replace(command[0], shutil.which("true") or ""), encoding="utf-8")
    assert "setpoint.service" not in run(verify, "verify", str(unit))


def test_the_container_file_names_what_exists() -> None:
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text(encoding="utf-8"))
    for sources in re.findall(r"^COPY (.*) \S+$", lines, re.M):
        assert all((REPOSITORY / source).exists() for source in sources.split())
    entry, default = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", lines, re.M)[0])
        for word in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["/opt/setpoint/.venv/bin/setpoint", "serve"]
    assert parse(COMMANDS["serve"], [*entry[2:], *default]).options.metrics.enable_metrics


def drain_s(arguments: list[str]) -> float:
    """The drain time of a server with these arguments."""
    return parse(COMMANDS["serve"], arguments).options.server.drain_timeout


def test_no_supervisor_kills_a_server_that_drains() -> None:
    unit = (DEPLOY / "setpoint.service").read_text(encoding="utf-8")
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(stop_s) >= drain_s([]) + END_S
    guide = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (stop_s,) = re.findall(r"podman stop -t (\d+)", guide)
    assert int(stop_s) >= drain_s([]) + END_S


def test_the_options_of_the_guide_are_options() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"serve\.yaml >/dev/null <<EOF\n(.*?)\nEOF", text, re.S)
    keys = [line.partition(":")[0] for line in options.splitlines()]
    assert keys == ["model-path", "enable-metrics", "api-key"]
    for flags in re.findall(r"--(?:enable-metrics|model-path) [^\n]*", text):
        line = shlex.split(flags.replace("$KEY", "key"))
        parse(COMMANDS["serve"], line)
