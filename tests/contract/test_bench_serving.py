"""The serving benchmark over real HTTP, against our own routes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bench_runs import SMALL, measure

from setpoint import cli
from setpoint.core.model import Pooling
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Url = Callable[..., str]
STEP_S = 0.004


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path


def letters() -> FakeEngine:
    return FakeEngine(script=lambda request: list(b"abcdefgh"), step_s=STEP_S, num_cached=3)


@pytest.mark.parametrize(
    "backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"]
)
@pytest.mark.parametrize("more", [[], ["--disable-stream"]])
def test_every_language_of_a_server(
    http_url: Url, folder: Path, backend: str, more: list[str]
) -> None:
    engine = letters()
    result = measure(folder, http_url(engine), "--backend", backend, *more)
    assert (result["completed"], result["failed"], result["errors"]) == (6, 0, [""] * 6)
    assert result["output_lens"] == [5] * 6
    assert result["generated_texts"] == ["abcde"] * 6
    assert result["total_output_tokens"] == result["total_output_tokens_retokenized"] == 30
    assert result["total_input_tokens"] == sum(
        len(request.prompt()) for request in engine.submitted[1:]
    )
    assert [request.sampling.max_new_tokens for request in engine.submitted] == [5] * 7
    assert all(
        request.sampling.ignore_eos and request.sampling.temperature == 0
        for request in engine.submitted
    )
    assert len(result["itls"][0]) == (0 if more else 4)
    # Five steps, of at least STEP_S each, lie before the end, and one before the first token.
    assert 5 * STEP_S <= result["mean_e2e_latency_ms"] / 1e3 < result["duration"]
    assert STEP_S * 1e3 <= result["mean_ttft_ms"] <= result["mean_e2e_latency_ms"]
    if not more:
        assert result["mean_tpot_ms"] >= STEP_S * 1e3 * 0.5
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert "pool" in result["server_info"]["internal_states"][0]


def test_options_reach_the_server(
    http_url: Url, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = letters()
    more = [
        "--tokenize-prompt",
        "--dataset-name",
        "random-ids",
        "--max-concurrency",
        "2",
        "--warmup-requests",
        "0",
        "--cache-report",
    ]
    more += [
        "--extra-request-body",
        '{"rid": null, "priority": 3}',
        "--disable-ignore-eos",
        "--flush-cache",
        "--tag",
        "one",
    ]
    result = measure(
        folder,
        http_url(engine),
        *more,
        "--goodput",
        "ttft:60000",
        "e2el:60000",
        "--plot-throughput",
        "--plot",
        str(tmp_path / "run.svg"),
    )
    assert len(engine.submitted) == 6
    assert all(
        len(request.prompt()) == 12 and not request.sampling.ignore_eos
        for request in engine.submitted
    )
    assert result["max_concurrent_requests"] == 2
    assert (
        result["total_cached_tokens"],
        result["device_cached_tokens"],
        result["cache_hit_rate_pct"],
    ) == (18, 18, 25.0)
    assert result["goodput"]["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["tag"] == "one"
    printed = capsys.readouterr().out
    for label in (
        "Successful requests:                     6\n",
        "Max request concurrency:                 2\n",
        "P99 TPOT (ms):",
        "Max ITL",
    ):
        assert label in printed
    assert "Output tokens per second (highest: " in printed
    assert "Concurrency (highest: " in printed
    assert "6 requests in " in (tmp_path / "run.svg").read_text()


def test_a_rate_spreads_the_requests(http_url: Url, folder: Path) -> None:
    result = measure(folder, http_url(letters()), "--request-rate", "40", "--seed", "3")
    assert result["completed"] == 6
    assert result["duration"] > 5 / 40 / 4
    assert result["request_rate"] == 40


def test_a_second_result_is_compared(
    http_url: Url, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = http_url(letters())
    measure(folder, url)
    other = folder / "other.jsonl"
    other.write_text((folder / "out.jsonl").read_text())
    measure(folder, url, "--compare", str(other))
    table = capsys.readouterr().out
    assert "NOTE" not in table
    assert f"| | this, 2 runs | {other}, 1 runs | this is |" in table
    assert "(only one run, so the noise is unknown)" in table
    measure(folder, url, "--compare", str(other), "--max-concurrency", "3", "--tag", "x")
    assert (
        "NOTE: The traffic differs: max_concurrency 3 (the other run: None).\n"
        in capsys.readouterr().out
    )


def test_embeddings(http_url: Url, folder: Path) -> None:
    result = measure(
        folder,
        http_url(FakeEngine(), pooling=Pooling("last", True, EMBEDDING_SIZE, None, "test")),
        "--backend",
        "sglang-embedding",
    )
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (
        6,
        72,
        0,
    )
    assert result["request_throughput"] > 0


def test_refused_requests_are_failures(
    http_url: Url, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = letters()
    result = measure(
        folder,
        http_url(engine),
        "--extra-request-body",
        '{"sampling_params": {"top_p": 7}}',
        "--warmup-requests",
        "0",
        code=3,
    )
    assert (
        result["completed"],
        result["failed"],
        result["total_output_tokens"],
        result["output_throughput"],
    ) == (0, 6, 0, 0)
    assert "failed, 6 x: status 400: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--random-input-len", "9000"],
            (
                "6 of 6 prompts do not fit the context of org/tiny, which is 256 tokens: the"
                " longest has 9000"
            ),
        ),
        (["--random-output-len", "600", "--random-range-ratio", "0"], "tokens and asks for"),
        (
            ["--dataset-name", "generated-shared-prefix", "--gsp-question-len", "4096"],
            "Lower --gsp-system-prompt-len",
        ),
    ],
)
def test_prompts_that_cannot_fit_are_refused_before_any_is_sent(
    http_url: Url, folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    engine = letters()
    url = http_url(engine)
    small = [*SMALL, "--gsp-num-groups", "1", "--gsp-prompts-per-group", "2"]
    assert (
        cli.main(["bench", "serving", "--base-url", url, "--tokenizer", str(folder), *small, *more])
        == 2
    )
    assert words in capsys.readouterr().err
    assert not engine.submitted
    if "9000" in more:  # a server that cuts prompts decides itself
        cutting = http_url(
            letters(), allow_auto_truncate=True, server_info={"allow_auto_truncate": True}
        )
        assert (
            cli.main(
                [
                    "bench",
                    "serving",
                    "--base-url",
                    cutting,
                    "--tokenizer",
                    str(folder),
                    *small,
                    *more,
                ]
            )
            == 0
        )


# -- servers that are not well
