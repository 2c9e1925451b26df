"""Measures how a whole engine's loop spends its steps with given batches, for the parts that a bare
executor does not have: scheduling and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from setpoint.bench.bench_progress import waiting
from setpoint.bench.breakdown import PHASES, LoopTimes, Shape, shape_text
from setpoint.bench.prompt_sets import make_prompts
from setpoint.config.bench import OfflineOptions
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.core.errors import ConfigError
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.offline.offline_engine import Engine


def engine_turns(
    line: CommandLine, env: EnvSettings, shapes: Sequence[Shape]
) -> dict[Shape, dict[str, LoopTimes]]:
    """The times of the engine's loop for each batch and phase, measured on a whole engine with the
    same options. Raises ConfigError for a batch that the engine cannot hold."""
    with Engine.from_options(line.options, env, given=line.given) as engine:
        info = engine.get_server_info()
        tokenizer = Tokenizer.from_folder(info["tokenizer_path"])
        for batch_size, input_len, output_len in shapes:
            slots, tokens = info["max_running_requests"], info["max_total_num_tokens"]
            if batch_size > slots or batch_size * (input_len + output_len) > tokens:
                raise ConfigError(
                    f"--breakdown runs {batch_size} requests of {input_len} + {output_len} tokens"
                    f" at once; the engine has room for {slots} requests and {tokens} tokens. Raise"
                    " --max-running-requests or --max-total-tokens, or measure a smaller batch."
                )
        return {shape: _turns(engine, tokenizer, shape) for shape in shapes}


def _turns(engine: Engine, tokenizer: Tokenizer, shape: Shape) -> dict[str, LoopTimes]:
    batch_size, input_len, output_len = shape
    found: list[dict[str, LoopTimes]] = []
    for seed, answer in enumerate((2, output_len)):  # the first run warms up
        options = OfflineOptions(
            dataset_name="random-ids",
            num_prompts=batch_size,
            random_input_len=input_len,
            random_output_len=answer,
            random_range_ratio=1.0,
            seed=seed,
        )
        prompts = [
            [int(token) for token in prompt.content]
            for prompt in make_prompts(options, tokenizer, as_ids=True)
        ]
        before = _sums(engine)
        with waiting(
            f"{'Measuring' if found else 'Warming up'} the engine with {shape_text(shape)}"
        ):
            engine.generate(
                input_ids=prompts,
                sampling_params={"temperature": 0.0, "max_new_tokens": answer, "ignore_eos": True},
            )
        found.append(dict(_differences(before, _sums(engine))))
        engine.flush_cache()
    return found[-1]


def _sums(engine: Engine) -> dict[str, dict[str, float]]:
    sums: dict[str, dict[str, float]] = engine.get_server_info()["internal_states"][0]["turn_times"]
    return sums


def _differences(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, LoopTimes]]:
    for phase in PHASES:
        spent = {name: after[phase][name] - before[phase][name] for name in after[phase]}
        per = spent["num_steps"] if phase == "decode" else 1
        seconds, link = spent["turn_s"] / per, spent["link_s"] / per
        yield phase, LoopTimes(seconds, link, seconds - link - spent["model_s"] / per)
