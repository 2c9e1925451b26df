"""``setpoint chat`` without a terminal, in this process: what cannot begin, and servers that
misbehave."""

from __future__ import annotations

import io

import pytest

from setpoint.cli import main
from setpoint_testing.misbehaving import KEY, misbehaving


def test_servers_that_misbehave_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        code = main(["chat", "--base-url", url, *arguments])
        return code, *capsys.readouterr()

    with misbehaving() as (url, _):
        assert run("refuses", "--api-key", KEY) == (1, "", "error: No.\n")
        assert run("breaks", "--api-key", KEY) == (1, "half\n", "error: The engine died.\n")
        assert run("stops", "--api-key", KEY) == (
            1,
            "half\n",
            "error: The server broke off in the middle of the answer.\n",
        )
        assert run("garbage", "--api-key", KEY)[2].startswith(
            "error: The server sent something that is not part of a chat answer"
        )
        assert run("evil", "--api-key", KEY) == (0, "␛]0;title␇\ufffd31m ok␍A\n", "")
        code, _, error = run()
        assert code == 1
        assert error.startswith(
            f"setpoint: error: {url} refused the API key; pass the right one with --api-key, or in"
            " the environment"
        )
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert run()[0] == 1  # the model is called "first", and that is no key of the table


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--base-url", "http://127.0.0.1:9/v1"],
            1,
            "http://127.0.0.1:9/v1 cannot be reached: [Errno 111] Connection refused.",
        ),
        (["--base-url", "nonsense"], 2, "must begin with http:// or https://"),
        (
            ["--base-url", "http://h/v1", "--dtype", "float32"],
            2,
            "--dtype is an option of an engine",
        ),
        (["--api-key", "k"], 2, "--api-key is the key of a server"),
        (["--is-embedding"], 2, "A chat needs a model that generates text"),
        (["--port", "1"], 2, "--port belongs to 'setpoint serve'"),
        (["--top-p", "0"], 2, "top_p must be above 0"),
        (["--temprature", "1"], 2, "Did you mean --temperature"),
    ],
)
def test_a_chat_that_cannot_begin(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["chat", *arguments]) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1
