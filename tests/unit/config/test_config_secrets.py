"""An option is kept secret by its declaration, whatever its name, wherever options are shown."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from setpoint.config.check import check_options
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.declare import MASK
from setpoint.config.options import OPTION_FIELDS, Options, launch_command
from setpoint.core.errors import ConfigError
from setpoint.launch.parent.assembly import server_info
from setpoint.launch.parent.configuration import settle
from setpoint.launch.parent.start_log import log_configuration
from setpoint_testing.tiny_models import write_tiny_llama


@pytest.fixture
def second_secret() -> Iterator[str]:
    """An option that was none is declared a secret."""
    (about,) = (field.about for field in OPTION_FIELDS if field.name == "served_model_name")
    object.__setattr__(about, "secret", True)
    yield "served_model_name"
    object.__setattr__(about, "secret", False)


def test_a_secret_is_neither_logged_nor_in_server_info(
    tmp_path: Path, second_secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options.of(
        model_path=str(write_tiny_llama(tmp_path)), api_key="sesame-1", served_model_name="sesame-2"
    )
    with caplog.at_level(logging.DEBUG):
        served = settle(options, EnvSettings(), frozenset({"api_key", "served_model_name"}))
        log_configuration(served, {})
    info = server_info(served.config, startup_s=1.0)
    assert "sesame" not in caplog.text + str(info)
    assert (info["api_key"], info[second_secret], info["port"]) == (MASK, MASK, 30000)
    assert MASK in caplog.text
    assert (
        server_info(
            settle(Options.of(model_path=str(tmp_path)), EnvSettings(), frozenset()).config,
            startup_s=1.0,
        )["api_key"]
        is None
    )


def test_a_message_about_a_secret_does_not_tell_it(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("api-key: [sesame]\n")
    with pytest.raises(ConfigError, match="api-key must be a single value") as caught:
        parse(SERVE, ["--config", str(tmp_path / "server.yaml")])
    assert "sesame" not in str(caught.value)


def test_the_launch_command_masks_secrets() -> None:
    options = Options.of(
        model_path="org/my model",
        api_key="sesame",
        enable_mixed_chunk=True,
        bucket_time_to_first_token=(0.1, 2.0),
    )
    given = {"model_path", "api_key", "enable_mixed_chunk", "log_requests"}
    command = launch_command(options, given | {"bucket_time_to_first_token"})
    words = shlex.split(command)
    assert words[:4] == ["setpoint", "serve", "--model-path", "org/my model"]
    assert words[words.index("--api-key") + 1] == MASK
    assert "sesame" not in command
    assert "--enable-mixed-chunk" in words
    assert "--log-requests" not in words, "false"
    at = words.index("--bucket-time-to-first-token")
    assert words[at + 1 : at + 3] == ["0.1", "2.0"]


@pytest.mark.parametrize("option", ["api_key", "admin_api_key", "extra_api_keys"])
@pytest.mark.parametrize(
    ("key", "words"),
    [("", "empty"), (" sesame", "blank"), ("ses\name", "break"), ("a\0b", "blank")],
)
def test_a_key_that_protects_nothing_or_fits_no_header_is_refused(
    option: str, key: str, words: str
) -> None:
    value = (key,) if option == "extra_api_keys" else key
    with pytest.raises(ConfigError, match=words) as refusal:
        check_options(Options.of(**{option: value}))
    assert str(refusal.value).startswith("--" + option.replace("_", "-"))
    assert "sesame" not in str(refusal.value)


def test_keys_may_have_any_letters() -> None:
    check_options(Options.of(api_key="ключ 1", admin_api_key="k", extra_api_keys=("a",)))


def test_no_client_gets_the_admin_key_as_its_own() -> None:
    with pytest.raises(ConfigError, match="a client could use the routes for operators"):
        check_options(Options.of(admin_api_key="sesame", extra_api_keys=("a", "sesame")))
    with pytest.raises(ConfigError, match="--api-key has the key of --admin-api-key"):
        check_options(Options.of(admin_api_key="sesame", api_key="sesame"))


@pytest.mark.parametrize("name", ["api-key", "api_key", "admin-api-key", "extra-api-keys"])
def test_a_file_whose_key_got_lost_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "server.yaml").write_text(f"{name}:\n")
    with pytest.raises(ConfigError, match=f"server.yaml: {name} has no value"):
        parse(SERVE, ["--config", str(tmp_path / "server.yaml")])
