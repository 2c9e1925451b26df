"""Metrics pages as the doctor reads them: names and labels of several versions of SGLang, counters
as differences, ranks apart, restarts, and pages of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.doctor.readers import metrics
from setpoint.doctor.readers.metrics import RESTARTED, of_scrapes
from setpoint.doctor.readers.scrape import Scrape, read_scrape
from setpoint.doctor.readers.sources import observe_sources

OLD = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="m"}} 7.0
sglang:num_queue_reqs{{model_name="m"}} 3.0
sglang:num_used_tokens{{model_name="m"}} 700.0
sglang:token_usage{{model_name="m"}} 0.35
sglang:gen_throughput{{model_name="m"}} 123.0
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {prompts}
sglang:cached_tokens_total{{model_name="m"}} {cached}
sglang:generation_tokens_total{{model_name="m"}} 5.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} {fast}
sglang:time_to_first_token_seconds_bucket{{le="0.2",model_name="m"}} {slow}
sglang:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {slow}
sglang:time_to_first_token_seconds_count{{model_name="m"}} {slow}
sglang:time_to_first_token_seconds_sum{{model_name="m"}} 1.0
"""


def new_page(at: int, *, colon: str = ":", ranks: tuple[str, ...] = ("0",)) -> str:
    lines = []
    for rank in ranks:
        labels = f'{{model_name="m",tp_rank="0",dp_rank="{rank}"}}'
        other = f'{{model_name="m",tp_rank="1",dp_rank="{rank}"}}'
        own = labels[:-1]
        for name, value in (
            ("num_running_reqs", 10 * (int(rank) + 1)),
            ("num_queue_reqs", 4),
            ("num_grammar_queue_reqs", 1),
            ("token_usage", 0.97),
            ("full_token_usage", 0.5),
            ("swa_token_usage", 0.97),
            ("num_used_tokens", 500),
            ("max_total_num_tokens", 1000),
            ("kv_available_tokens", 400),
            ("kv_evictable_tokens", 100),
            ("new_token_ratio", 0.3),
        ):
            lines += [f"sglang{colon}{name}{labels} {value}", f"sglang{colon}{name}{other} 999"]
        lines += [
            f"sglang{colon}num_retracted_requests_total{labels} {2 * at}",
            f'sglang{colon}realtime_tokens_total{own},mode="prefill_compute"}} {100 * at}',
            f'sglang{colon}realtime_tokens_total{own},mode="prefill_cache"}} {50 * at}',
            f'sglang{colon}realtime_tokens_total{own},mode="decode"}} {30 * at}',
            f'sglang{colon}cuda_graph_passes_total{own},mode="decode_cuda_graph"}} {8 * at}',
            f'sglang{colon}cuda_graph_passes_total{own},mode="decode_none"}} {2 * at}',
            f'sglang{colon}cuda_graph_passes_total{own},mode="prefill_none"}} {3 * at}',
            f"sglang{colon}scheduler_idle_seconds_total{labels} {0.25 * at}",
            f'sglang{colon}forward_execution_seconds_total{own},category="decode"}} {0.5 * at}',
        ]
    return "\n".join(lines) + "\n"


def scrape(page: str, at: float) -> Scrape:
    return read_scrape(page, at=at, name="page")


def moments(*pages: str) -> list[Moment]:
    seen = of_scrapes([scrape(page, float(at)) for at, page in enumerate(pages)], name="page")
    (rank,) = seen.ranks
    return rank.moments


def test_a_page_of_2024_tells_its_gauges_and_what_was_counted() -> None:
    (moment,) = moments(
        OLD.format(prompts=100, cached=10, fast=1, slow=1),
        OLD.format(prompts=400, cached=60, fast=11, slow=21),
    )
    assert (moment.running, moment.queue, moment.usage, moment.tokens) == (7, 3, 0.35, 700)
    assert (moment.new_tokens, moment.cached_tokens) == (250, 50)
    assert moment.gen_throughput == 123.0
    assert moment.output_tokens is None  # counted when requests end
    assert moment.refusals == {}
    # Of twenty new ones, ten are below 0.1 s, ten between 0.1 and 0.2.
    assert moment.quantiles == {
        "ttft_p50": pytest.approx(0.1),
        "ttft_p95": pytest.approx(0.19),
        "ttft_p99": pytest.approx(0.198),
    }


@pytest.mark.parametrize("colon", [":", "_"])
def test_a_page_of_today_tells_everything(colon: str) -> None:
    first, second = moments(*(new_page(at, colon=colon) for at in range(3)))
    assert (first.at, second.at, second.seconds) == (0.0, 1.0, 1.0)
    assert (second.running, second.queue, second.preparing) == (10, 4, 1)
    assert (second.usage, second.other_usage) == (0.5, {"swa": 0.97})
    assert second.pool == {"total": 1000, "free": 400, "evictable": 100}
    assert (second.new_tokens, second.cached_tokens, second.output_tokens) == (100, 50, 30)
    assert (second.num_prefill, second.num_decode) == (3, 10)
    assert (second.graph_hits, second.graph_misses) == (8, 2)
    assert (second.retractions, second.retracted) == (1, 2)
    assert (second.busy_s, second.model_s) == (0.75, 0.5)
    assert "10.0 requests run" in second.text


def test_ranks_are_apart() -> None:
    pages = [scrape(new_page(at, ranks=("0", "1")), float(at)) for at in range(3)]
    seen = of_scrapes(pages, name="page")
    assert [rank.name for rank in seen.ranks] == ["DP0", "DP1"]
    assert [rank.moments[-1].running for rank in seen.ranks] == [10, 20]
    assert seen.facts.max_total_num_tokens == 1000
    assert seen.ranks[0].num_events == {"retraction": 2}


def test_a_restart_begins_a_new_life() -> None:
    pages = [scrape(new_page(at), float(time)) for time, at in enumerate((7, 8, 1, 2, 3))]
    seen = of_scrapes(pages, name="page")
    assert [moment.at for moment in seen.ranks[0].moments] == [2.0, 3.0]
    assert any("restarted" in note for note in seen.sources[0].notes)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("", "no series of SGLang or Setpoint"),
        ("# HELP go_gc_duration_seconds x\ngo_gc_duration_seconds 1\n", "no series of SGLang"),
        ("<html><body>hello</body></html>", "not a page of metrics|no series"),
        ('sglang:token_usage{x="1" 0.5', "not a page of metrics"),
        ("\x00\x01\x02", "not a page of metrics|no series"),
    ],
)
def test_other_pages_are_refused_in_one_sentence(page: str, words: str) -> None:
    with pytest.raises(SourceError, match=words) as raised:
        scrape(page, 0.0)
    assert "\n" not in str(raised.value)


def test_saved_pages_one_or_many(tmp_path: Path) -> None:
    one, many = tmp_path / "one.txt", tmp_path / "many.txt"
    page = "# HELP sglang:num_running_reqs Running.\n# TYPE sglang:num_running_reqs gauge\n"
    one.write_text(page + new_page(1))
    many.write_text("".join(page + new_page(at) for at in range(4)))
    (single,), (several,) = (observe_sources([str(path)], seconds=1) for path in (one, many))
    assert [source.kind for source in single.sources] == ["metrics"]
    assert "one moment" in single.sources[0].notes[0]
    assert (single.ranks[0].moments[0].running, single.ranks[0].moments[0].new_tokens) == (10, 0)
    assert [moment.new_tokens for moment in several.ranks[0].moments] == [100] * 3
    assert several.sources[0].clock == "none"


def test_a_saved_file_of_any_length_and_with_any_number_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "many.txt"
    page = "# HELP sglang:num_running_reqs Running.\n# TYPE sglang:num_running_reqs gauge\n"
    tokens = 'sglang:realtime_tokens_total{{mode="decode",tp_rank="0"}} {}\n'
    restarts = (page + tokens.format(10_000 - at) for at in range(1500))
    path.write_text("".join([*restarts, page + tokens.format(9000)]))
    (seen,) = observe_sources([str(path)], seconds=1)
    assert seen.sources[0].notes == [RESTARTED]
    assert len(seen.ranks[0].moments) == 1
    monkeypatch.setattr(metrics, "MAX_BYTES", 1 << 10)
    with pytest.raises(SourceError, match=r"many\.txt is longer than"):
        observe_sources([str(path)], seconds=1)


def test_figures_that_cannot_be_are_left_out_with_a_note() -> None:
    page = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{} NaN
sglang:token_usage{} 7
sglang:num_queue_reqs{} 1e22
sglang:gen_throughput{} 5
"""
    seen = of_scrapes([scrape(page, 0.0), scrape(page, 1.0)], name="x")
    (moment,) = seen.ranks[0].moments
    assert (moment.running, moment.usage, moment.queue) == (None, None, None)
    assert moment.gen_throughput == 5
    assert "6, the first of them num_running_reqs=nan" in seen.sources[0].notes[0]
