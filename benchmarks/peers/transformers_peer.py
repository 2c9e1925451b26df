"""transformers as a peer: eager ``generate`` on a static batch in bfloat16, one JSON job per line
of standard input.

    python benchmarks/peers/transformers_peer.py FOLDER --num-threads 2

The program writes an empty object when the model is loaded. A job is ``{"prompts": [[ids]],
"num_outputs": n}``, with prompts of equal length. The answer is ``{"wall_s", "num_generated",
"ttft_s", "decode_s"}``; the last two are null for more than one prompt. It is timed without HTTP,
which is in the peer's favour.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Stopwatch:
    """A streamer that notes when each token came. Its first call has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def generate(model: Any, prompts: list[list[int]], num_outputs: int) -> dict[str, Any]:
    ids = torch.tensor(prompts)
    watch = Stopwatch() if len(prompts) == 1 else None
    begin = time.perf_counter()
    with torch.inference_mode():
        outputs = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_outputs,
            min_new_tokens=num_outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=watch,
        )
    wall = time.perf_counter() - begin
    tokens = watch.times[1:] if watch else []
    return {
        "wall_s": wall,
        "num_generated": (outputs.shape[1] - ids.shape[1]) * len(prompts),
        "ttft_s": tokens[0] - begin if tokens else None,
        "decode_s": tokens[-1] - tokens[0] if tokens else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16).eval()
    print("{}", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(generate(model, job["prompts"], job["num_outputs"])), flush=True)


if __name__ == "__main__":
    main()
