"""``--kv-events-config``: what it becomes, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from setpoint.config.check import check_options
from setpoint.config.groups.events import EventOptions, publisher_config, publisher_info
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.core.kv_events import PublisherConfig


def config_of(num_ranks: int = 1, **keys: Any) -> PublisherConfig | None:
    text = json.dumps({"publisher": "zmq", **keys})
    return publisher_config(EventOptions(kv_events_config=text), num_ranks=num_ranks)


def test_keys_and_defaults_are_sglangs() -> None:
    assert publisher_config(EventOptions()) is None
    assert publisher_config(EventOptions(kv_events_config="{}")) is None
    config = config_of()
    assert config is not None
    assert (config.endpoint, config.topic, config.replay_endpoint) == ("tcp://*:5557", "", None)
    assert (config.buffer_steps, config.hwm) == (10_000, 100_000)


@pytest.mark.parametrize(
    ("keys", "binds"),
    [
        ({}, True),
        ({"endpoint": "tcp://0.0.0.0:5557"}, True),
        ({"endpoint": "ipc:///run/events"}, True),
        ({"endpoint": "tcp://127.0.0.1:5557"}, False),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, True),
        ({"endpoint": "tcp://*:5557", "bind": False}, False),
    ],
)
def test_an_address_is_bound_or_connected_to(keys: dict[str, Any], binds: bool) -> None:
    config = config_of(**keys)
    assert config is not None
    assert config.binds == binds


def test_server_info_describes_it_as_sglang_does() -> None:
    config = config_of(2, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5567", topic="kv")
    assert config is not None
    assert publisher_info(config, page_size=16, num_ranks=2) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
        "replay_endpoint_port_base": 5567,
    }
    config = config_of(endpoint="ipc:///run/events")
    assert config is not None
    assert publisher_info(config, page_size=1, num_ranks=1) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "Its keys are publisher, endpoint"),
        ('{"publisher": "nats"}', "publisher must be zmq or null, got 'nats'"),
        ('{"publisher": "zmq", "port": 1}', "unknown field `port`"),
        ('{"publisher": "zmq", "hwm": "many"}', "Expected `int`"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm must be from 1 to 2147483647, got 0"),
        ('{"publisher": "zmq", "buffer_steps": 99999999999}', "to 2147483647, got 99999999999"),
        ('{"publisher": "zmq", "format": "other"}', "Invalid enum value 'other'"),
        ('{"publisher": "zmq", "endpoint": "localhost:5557"}', "tcp://HOST:PORT, or ipc://PATH"),
        ('{"publisher": "zmq", "endpoint": "inproc://events"}', "tcp://HOST:PORT, or ipc://PATH"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:70000"}', "got 'tcp://*:70000'"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*"}', "replay_endpoint must be"),
        (
            '{"publisher": "zmq", "replay_endpoint": "tcp://*:5557"}',
            "the ports of endpoint and replay_endpoint overlap",
        ),
    ],
)
def test_what_cannot_be_published_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_options(Options.of(kv_events_config=text))
    assert "--kv-events-config" in str(refusal.value)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_each_rank_needs_a_port_of_its_own() -> None:
    with pytest.raises(
        ConfigError, match=r"Each needs 3 ports of its own, beginning with 5557 and 5559"
    ):
        config_of(3, replay_endpoint="tcp://*:5559")
    assert config_of(2, replay_endpoint="tcp://*:5559") is not None
    with pytest.raises(ConfigError, match="with 2 ports from PORT on"):
        config_of(2, endpoint="ipc:///run/events")
    with pytest.raises(ConfigError, match="with 2 ports from PORT on"):
        config_of(2, endpoint="tcp://*:65535")


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    options = Options.of(kv_events_config='{"publisher": "zmq"}', disable_radix_cache=True)
    with pytest.raises(ConfigError, match="drop one of the two"):
        check_options(options)


def test_without_pyzmq_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from setpoint.launch.parent.publishing import publishing\n"
        "from setpoint.config.options import Options\n"
        """with publishing(Options.of(kv_events_config='{"publisher": "zmq"}')): pass\n"""
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ".venv/bin/pip install -e '.[kv-events]'" in run.stderr.splitlines()[-1]
