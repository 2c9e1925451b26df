"""What a start says and checks before there is an engine: the invitation, news for whoever waits,
what can be known early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from setpoint.config import hardware
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError, ConfigError
from setpoint.core.progress import report, reported_to
from setpoint.launch.parent.invitation import address, invitation
from setpoint.launch.parent.preflight import preflight
from setpoint.launch.parent.server import _invitation
from setpoint.observe.progress_display import Display, Waiting, on_stderr

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_the_address_is_one_that_works_here(host: str, url: str) -> None:
    assert address(host, 80) == url


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("is_embedding", [False, True])
def test_the_invitation_is_python_and_a_command_on_lines_of_their_own(
    has_key: bool, is_embedding: bool
) -> None:
    first, ready, console, second, shell, third, *python = invitation(
        "http://h:1", has_key=has_key, is_embedding=is_embedding
    ).splitlines()
    assert (first, ready, second, third) == ("", "Ready: http://h:1", "", "")
    assert console == "Console: http://h:1/console"
    assert shell.startswith("curl http://h:1/v1/")
    assert ("$API_KEY" in shell) == has_key
    assert not any(line.startswith(" ") or line.endswith("\\") for line in python)
    compile("\n".join(python), "start-up", "exec")


@pytest.mark.parametrize("is_embedding", [False, True])
def test_the_invitation_of_several_models_names_the_first(is_embedding: bool) -> None:
    text = invitation("http://h:1", has_key=False, is_embedding=is_embedding, model="team/a")
    _, _, _, _, shell, _, *python = text.splitlines()
    assert """-d '{"model": "team/a", """ in shell
    assert any('create(model="team/a", ' in line for line in python)


@pytest.mark.parametrize("has_key", [False, True])
def test_the_invitation_of_a_server_without_text_sends_ids(has_key: bool) -> None:
    text = invitation("http://h:1", has_key=has_key, is_embedding=False, is_ids_only=True)
    _, _, _, _, shell, _, *python = text.splitlines()
    assert shell.startswith("curl http://h:1/generate ")
    assert "input_ids" in shell
    assert "/v1/" not in text
    assert ("$API_KEY" in shell) == has_key
    assert not any(line.startswith(" ") for line in python)
    compile("\n".join(python), "start-up", "exec")


@pytest.mark.parametrize(
    ("mode", "servers", "is_for_clients"),
    [("prefill", (), False), ("decode", (), False), ("decode", ("http://p:1",), True)],
)
def test_no_example_for_a_server_that_clients_do_not_talk_to(
    mode: str, servers: tuple[str, ...], is_for_clients: bool
) -> None:
    options = Options.of(disaggregation_mode=mode, disaggregation_prefill_servers=servers)
    text = _invitation("http://h:1", options)
    assert ("curl" in text) == is_for_clients
    assert (f"This is a {mode} server" in text) != is_for_clients


def test_the_readme_shows_what_a_start_prints() -> None:
    text = README.read_text(encoding="utf-8")
    _, _, _, _, shell, _, *python = invitation(
        "http://127.0.0.1:30000", has_key=False, is_embedding=False
    ).splitlines()
    assert f"```sh\n{shell}\n```" in text
    assert "```python\n" + "\n".join(python) + "\n```" in text


def test_whoever_waits_is_told_what_for() -> None:
    shown: list[str] = []
    cleared: list[int] = []
    waiting = Waiting(
        "Loading m", Display(shown.append, 0.01, lambda: cleared.append(len(shown))), first_s=0.0
    )
    with reported_to(waiting.doing):
        report("compiling, 3 of 9 files")
    deadline = time.monotonic() + 10
    while not any("compiling" in text for text in shown) and time.monotonic() < deadline:
        time.sleep(0.005)
    waiting.end()
    waiting.end()
    assert "Loading m: compiling, 3 of 9 files … 0 s" in shown
    assert cleared == [len(shown)]
    report("nobody listens any more")


def test_on_a_terminal_it_is_one_line_however_narrow_that_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    display = on_stderr()
    display.show("Loading m: compiling the kernels, 3 of 9 files … 12 s")
    display.show("Loading m … 13 s")
    display.clear()
    first, second, cleared = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert (first, second, cleared) == ("Loading m: com…9 files … 12 s", "Loading m … 13 s", "")


def test_what_is_quick_is_not_spoken_of() -> None:
    shown: list[str] = []
    waiting = Waiting("Loading m", Display(shown.append, 0.01, lambda: shown.append("cleared")))
    waiting.end()
    assert shown == []


def test_a_gpu_is_missed_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError,
        match=(
            "--device cuda was asked for, but CUDA_VISIBLE_DEVICES hides every GPU; use"
            " --device cpu"
        ),
    ):
        preflight(Options.of(device="cuda"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert hardware.why_no_cuda(tmp_path) == (
        "this machine has no NVIDIA GPU or driver (none of /dev/nvidiactl,"
        " /proc/driver/nvidia/version, /dev/dxg, /dev/nvhost-ctrl exists)"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: False)
    assert "built without CUDA (it has no lib/" in hardware.why_no_cuda(tmp_path)
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    assert hardware.why_no_cuda(tmp_path) == ""


def test_an_expression_for_whitespace_is_compiled_before_anything_is_started() -> None:
    """Red before: it was accepted, and every client of a schema got a 400."""
    flag = "--constrained-json-whitespace-pattern"
    for pattern, why in (("(?=x)", "look-around"), ("ab", "more than spaces"), ("[", "not closed")):
        with pytest.raises(ConfigError, match=f"{flag} .*{why}"):
            preflight(Options.of(constrained_json_whitespace_pattern=pattern))
    preflight(Options.of(constrained_json_whitespace_pattern=r"[\n ]*"))


def test_a_chat_template_is_read_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat-template /nope: no such file"):
        preflight(Options.of(chat_template="/nope"))
    (tmp_path / "t.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="chat template cannot be compiled"):
        preflight(Options.of(chat_template=str(tmp_path / "t.jinja")))
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    preflight(Options.of(chat_template=str(tmp_path / "t.jinja")))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ '%0999999999d' % 1 }}", "it needs more than 512 MiB of memory"),
        ("{{ 'a' * 999999999 }}", "it needs more than 512 MiB of memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 s"),
        ("{{ 10 ** (10 ** 9) }}", "2 s"),
    ],
)
def test_a_chat_template_that_exceeds_a_limit_is_named(
    tmp_path: Path, template: str, words: str
) -> None:
    """Red before: it was computed in the launcher, where nothing limits it, for 30 s in silence."""
    path = tmp_path / "t.jinja"
    path.write_text(template)
    with pytest.raises(CheckpointError, match=words) as caught:
        preflight(Options.of(chat_template=str(path)))
    assert str(path) in str(caught.value)
