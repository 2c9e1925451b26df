"""OpenVINO GenAI as a peer: its pipeline with continuous batching, one JSON job per line of
standard input.

    VENV/bin/python benchmarks/peers/openvino_peer.py FOLDER --num-threads 2

FOLDER has a model that optimum-intel has exported (install.py). The program writes an empty object
when the model is loaded. A job is ``{"prompts": [[ids]], "num_outputs": n}``. The answer is
``{"wall_s", "num_generated", "ttft_s", "decode_s"}``; the last two are null for more than one
prompt. It is timed without HTTP, which is in the peer's favour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 4
"""Twice what 64 of the longest sequences need in bf16."""
NUM_SLOTS = 64
_numbers = itertools.count()


def load(folder: str, num_threads: int) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = NUM_SLOTS
    # Four of W4's prompts per step, as vLLM has; by default it is 256.
    scheduler.max_num_batched_tokens = 2048
    # For W3; off by default.
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "bf16"}
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def generate(pipeline: Any, prompts: list[list[int]], num_outputs: int) -> dict[str, Any]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_outputs
    config.ignore_eos = True
    config.do_sample = False
    ids = [openvino.Tensor(np.array([prompt])) for prompt in prompts]
    times, num_generated = [], 0
    begin = time.perf_counter()
    running = [pipeline.add_request(next(_numbers), each, config) for each in ids]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        if len(running) == 1:
            times.append(time.perf_counter())
    wall = time.perf_counter() - begin
    for handle in running:
        while handle.can_read():
            num_generated += sum(len(each.generated_ids) for each in handle.read().values())
    alone = len(prompts) == 1
    return {
        "wall_s": wall,
        "num_generated": num_generated,
        # Each step after the prompt's yields one token.
        "ttft_s": times[len(times) - num_outputs] - begin if alone else None,
        "decode_s": times[-1] - times[len(times) - num_outputs] if alone else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    pipeline = load(args.folder, args.num_threads)
    print("{}", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(generate(pipeline, job["prompts"], job["num_outputs"])), flush=True)


if __name__ == "__main__":
    main()
