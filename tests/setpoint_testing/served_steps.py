"""Which kernels a server would have to compile: steps of random sizes and kinds of sampling on an absent
GPU, with the kernels that are in Triton's folder already.

    PYTHONPATH=tests python -m setpoint_testing.served_steps FOLDER TP_SIZE CONTEXT STEP_TOKENS

It prints the kernels that were compiled and the number of those that were read, as JSON. The sizes of
the tables and of the pool are others than those with which the kernels were compiled.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np

from setpoint.checkpoint.spec import read_spec
from setpoint.core.graph_sizes import GraphSizes
from setpoint.core.plan import OWN_LENGTH, TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor import ahead_of_time
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.triton.absent_gpu import AbsentGpu, Variant
from setpoint_testing.plans import Driver, allocate_rows

CAPABILITY, PAGE, SLOTS = 90, 16, 37
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.1, presence_penalty=0.5),
    SamplingParams(top_p=0.5, logit_bias=((1, 2.0), (4, -1.0))),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(min_new_tokens=3),
)
SIZES = GraphSizes((1, 2, 4, 8, 12, 16), (4, 8, 12, 16, 20))


def served_steps(
    folder: Path, tp_size: int, context: int, step_tokens: int
) -> tuple[list[str], int]:
    """(the kernels that were compiled, the number of those that were read)"""
    found: list[Variant] = []
    ahead_of_time.use_absent_gpu(AbsentGpu(CAPABILITY), found.append)
    config = EngineConfig(
        str(folder), read_spec(folder), device="meta", dtype="bfloat16", kv_dtype="bfloat16",
        page_size=PAGE, load_format="dummy", graph_sizes=SIZES,
    )  # fmt: skip
    runner = build_runner(config, ahead_of_time.absent_group(0, tp_size, sums=not config.invariant))
    runner.footprint(step_tokens=step_tokens, context_len=context)
    pages = context // PAGE
    groups = allocate_rows(runner, num_rows=SLOTS * pages, max_slots=SLOTS, context_len=context)
    driver = Driver(None, PAGE, pages, groups)  # type: ignore[arg-type]
    draw = random.Random(3)
    ran = set()
    for _ in range(60):
        plan = driver.plan()
        rows, left = draw.randint(1, SLOTS), step_tokens
        for slot in range(rows):
            count = min(draw.choice((1, 1, 2, 7, 30, context - 1)), left - (rows - slot))
            options = draw.choice(
                (
                    RequestOptions(),
                    RequestOptions(),
                    RequestOptions(logprobs=LogprobOptions(top=draw.randint(0, 4), ids=(3,))),
                )
            )
            sampling = draw.choice(SAMPLINGS)
            driver.admit(
                plan, slot, [7] * count, sampling=sampling, options=options,
                logprob_start=draw.choice((-1, 1)), stop_ids=(2,) * bool(sampling.min_new_tokens),
            )  # fmt: skip
            plan.add_row(slot, slot, 0, count, draw.randint(0, 1))
            left -= count
        ran.add(_run(runner, plan, draw))
        for kind in draw.sample(SAMPLINGS, 2):
            chosen = draw.sample(range(rows), draw.randint(1, rows))
            plan = driver.plan()
            for slot in chosen:
                driver.admit(plan, slot, [7] * 5, sampling=kind)
                plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
            ran.add(_run(runner, plan, draw))
    assert ran == {"graph", "eager"}
    assert {each.kernel for each in found} >= {"attention_pieces", "collect_candidates"}
    compiled = [each.kernel for each in found if not each.is_known]
    return compiled, len(found) - len(compiled)


def _run(runner, plan, draw: random.Random) -> str:
    forward = runner.forward(plan.build())
    sampling = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
    masks = None
    if sampling and draw.random() < 0.4:
        slots = draw.sample(sampling, draw.randint(1, len(sampling)))
        words = np.full((len(slots), -(-runner.spec.vocab_size // 32)), -1, np.int32)
        masks = TokenMasks(np.array(slots, np.int32), words)
    runner.sample(forward, masks)
    assert forward.failures == {}
    return forward.way.name


if __name__ == "__main__":
    folder, *sizes = sys.argv[1:]
    print(json.dumps(served_steps(Path(folder), *map(int, sizes))))
