"""Options of ``/metrics``: what they become, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from setpoint.config.check import check_options
from setpoint.config.commandline import parse, parse_keywords
from setpoint.config.commands import COMMANDS
from setpoint.config.groups.metrics import buckets_of, extra_labels
from setpoint.config.groups.traces import otlp_url
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.launch.parent.preflight import preflight

SERVE = COMMANDS["serve"]


def test_buckets_and_labels_of_a_command_line() -> None:
    line = (
        "--enable-metrics --bucket-time-to-first-token 0.5 1 2 --prompt-tokens-buckets custom 8 64"
        " --generation-tokens-buckets tse 100 2 4 --tokenizer-metrics-allowed-custom-labels a b"
    )
    options = parse(SERVE, [*line.split(), "--extra-metric-labels", '{"site": "x"}']).options
    assert buckets_of(options.metrics) == {
        "sglang:time_to_first_token_seconds": (0.5, 1, 2),
        "sglang:prompt_tokens_histogram": (8, 64),
        "sglang:uncached_prompt_tokens_histogram": (8, 64),
        "sglang:generation_tokens_histogram": (96, 98, 100, 102, 104),
    }
    assert extra_labels(options.metrics) == {"site": "x"}
    assert options.metrics.tokenizer_metrics_allowed_custom_labels == ("a", "b")


def test_a_config_file_and_keywords_may_have_lists(tmp_path: Any) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("bucket-time-to-first-token: [1, 2.5]\nextra-metric-labels: {site: x}\n")
    options = parse(SERVE, ["--config", str(path)]).options
    assert options.metrics.bucket_time_to_first_token == (1.0, 2.5)
    assert extra_labels(options.metrics) == {"site": "x"}
    options = parse_keywords(SERVE, {"prompt_tokens_buckets": ["custom", 1, 2]}).options
    assert options.metrics.prompt_tokens_buckets == ("custom", "1", "2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--bucket-time-to-first-token", "2", "1"], "larger than the one before"),
        (["--bucket-time-to-first-token", "-1", "1"], "at least 0"),
        (["--bucket-inter-token-latency", "1", "nan"], "a finite number"),
        (["--bucket-e2e-request-latency", "x"], "'x' is not a number"),
        (["--bucket-e2e-request-latency", *map(str, range(201))], "at most 200"),
        (["--prompt-tokens-buckets", "custom"], "must be 'default'"),
        (["--prompt-tokens-buckets", "custom", "1", "inf"], "a finite number"),
        (["--prompt-tokens-buckets", "default", "1"], "must be 'default'"),
        (["--generation-tokens-buckets", "tse", "10", "1", "4"], "a base above 1"),
        (["--generation-tokens-buckets", "tse", "10", "1e300", "4"], "a base above 1"),
        (["--generation-tokens-buckets", "log", "10"], "must be 'default'"),
        (["--extra-metric-labels", "[1]"], "must be a JSON object"),
        (["--extra-metric-labels", '{"a": 1}'], "whose values are text"),
        (["--extra-metric-labels", '{"9a": "b"}'], "'9a' cannot be the name of a label"),
        (["--extra-metric-labels", '{"model_name": "b"}'], "'model_name' is already in use"),
        (
            [
                *("--extra-metric-labels", '{"team": "b"}'),
                *("--tokenizer-metrics-allowed-custom-labels", "team"),
            ],
            "name the same label",
        ),
        (
            ["--tokenizer-metrics-allowed-custom-labels", "a-b"],
            "'a-b' cannot be the name of a label",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(SERVE, line)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://a.example", "http://a.example/v1/traces"),
        ("https://a.example:443/v1/traces", "https://a.example:443/v1/traces"),
        ("https://a.example/otlp/", "https://a.example/otlp"),
        ("[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_addresses_of_a_collector(address: str, url: str) -> None:
    assert otlp_url(address) == url


@pytest.mark.parametrize("address", ["", "a:b", "a:0", "grpc://a:4317", "http://", "a:99999"])
def test_addresses_that_no_collector_has(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT or a URL"):
        check_options(Options.of(enable_trace=True, otlp_traces_endpoint=address))


def test_a_missing_extra_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    preflight(Options.of(enable_trace=True))
    for missing in (find, lambda name: None):
        monkeypatch.setattr("setpoint.config.extras.find_spec", missing)
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[trace\]'"):
            preflight(Options.of(enable_trace=True))


def test_the_folder_of_figures_is_made_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    preflight(Options.of(export_metrics_to_file=True, export_metrics_to_file_dir=str(folder)))
    assert folder.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        preflight(
            Options.of(export_metrics_to_file=True, export_metrics_to_file_dir=f"{tmp_path}/file/x")
        )
    with pytest.raises(ConfigError, match="needs --export-metrics-to-file-dir"):
        parse(SERVE, ["--export-metrics-to-file"])


def test_a_server_without_metrics_and_traces_does_not_import_their_libraries() -> None:
    """They take a tenth of a second each, which every start would pay."""
    code = (
        "import sys; import setpoint.launch.parent.server, setpoint.launch.parent.assembly,"
        " setpoint.launch.parent.preflight, setpoint.frontend.apis.dialects, setpoint.frontend.http.app;"
        " print({'prometheus_client', 'opentelemetry.sdk'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
