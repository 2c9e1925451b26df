"""``setpoint bench offline``: gives all requests to an Engine at once and measures its throughput.

Exit codes: 0: every request was answered; 3: some failed.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from setpoint.bench import comparison, report
from setpoint.bench.bench_progress import waiting
from setpoint.bench.emulation import refuse_emulation
from setpoint.bench.prompt_sets import make_prompts
from setpoint.bench.request_record import Prompt
from setpoint.bench.run_metrics import totals
from setpoint.config.bench import OfflineOptions
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.observe.logline import setup_logging
from setpoint.offline.offline_engine import Engine

FAILED = 3
_WARMUP = OfflineOptions(
    dataset_name="random-ids", num_prompts=16, random_input_len=64, random_output_len=16
)


def bench_offline(line: CommandLine, env: EnvSettings) -> int:
    """Measure, print and record the throughput; returns the exit code. Raises SetpointError."""
    own: OfflineOptions = line.own
    setup_logging(line.options.logs.log_level, milliseconds=env.log_ms)
    report.check_writable(own.output_file)
    previous = comparison.Comparison(own.compare) if own.compare is not None else None
    with Engine.from_options(line.options, env, given=line.given) as engine:
        result = _measure(engine, own)
    report.print_offline(result)
    if own.output_file is not None:
        report.append(own.output_file, result)
    if previous is not None:
        print(previous.table(result, own.output_file))
    return FAILED if result["failed"] else 0


def _measure(engine: Engine, own: OfflineOptions) -> dict[str, Any]:
    info = engine.get_server_info()
    refuse_emulation(info)
    tokenizer = Tokenizer.from_folder(info["tokenizer_path"])
    with waiting(f"Making {own.num_prompts} prompts"):
        prompts = make_prompts(own, tokenizer)
    if not own.skip_warmup:
        with waiting(f"Warming up with {_WARMUP.num_prompts} requests"):
            _generate(engine, make_prompts(_WARMUP, tokenizer), ignore_eos=True)
        engine.flush_cache()
    with waiting(f"Answering {len(prompts)} requests"):
        began = time.perf_counter()
        answers = _generate(engine, prompts, ignore_eos=not own.disable_ignore_eos)
        duration = time.perf_counter() - began
    server_info = engine.get_server_info()
    metas = [answer["meta_info"] for answer in answers]
    good = [meta for meta in metas if meta["finish_reason"]["type"] != "abort"]
    failures = Counter(
        meta["finish_reason"]["message"]
        for meta in metas
        if meta["finish_reason"]["type"] == "abort"
    )
    inputs, outputs = (
        sum(meta[name] for meta in good) for name in ("prompt_tokens", "completion_tokens")
    )
    return {
        "backend": "engine",
        "dataset_name": own.dataset_name,
        "successful_requests": len(good),
        "total_latency": duration,
        **totals(len(good), inputs, outputs, duration),
        "last_gen_throughput": server_info["internal_states"][0]["last_gen_throughput"],
        "total_cached_tokens": sum(meta["cached_tokens"] for meta in good),
        "failed": failures.total(),
        "failures": dict(failures.most_common()),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": msgspec.to_builtins(own),
        "server_info": server_info,
    }


def _generate(engine: Engine, prompts: list[Prompt], *, ignore_eos: bool) -> list[dict[str, Any]]:
    texts = [str(prompt.content) for prompt in prompts]
    sampling = [
        {"temperature": 0.0, "max_new_tokens": prompt.output_len, "ignore_eos": ignore_eos}
        for prompt in prompts
    ]
    answers: list[dict[str, Any]] = engine.generate(texts, sampling)
    return answers
