"""The options of ``setpoint bench``: SGLang's names for what its benchmark tools have, and a few of
Setpoint's own."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.declare import Option

DATASET = "Dataset"
RESULTS = "Results"

DATASETS = ("random", "random-ids", "generated-shared-prefix", "sharegpt", "custom")


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts and answers to ask for. Shared by the benchmarks that send prompts."""

    dataset_name: Annotated[
        str,
        Option(
            DATASET,
            "random: words from the tokenizer's vocabulary; random-ids: any of its ids;"
            " generated-shared-prefix: groups of prompts that share a beginning; sharegpt and"
            " custom: prompts from --dataset-path.",
            choices=DATASETS,
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None,
        Option(
            DATASET,
            "ShareGPT's JSON file, or JSON lines with the key conversations, or prompt and"
            " output_len.",
            metavar="FILE",
        ),
    ] = None
    num_prompts: Annotated[int, Option(DATASET, "Number of requests.", low=1)] = 1000
    seed: Annotated[
        int,
        Option(
            DATASET,
            "Seed of prompts, lengths and arrival times: the same seed gives the same traffic.",
            low=0,
        ),
    ] = 42
    random_input_len: Annotated[
        int, Option(DATASET, "Maximum tokens of a random prompt.", low=1)
    ] = 1024
    random_output_len: Annotated[int, Option(DATASET, "Maximum tokens of its answer.", low=1)] = (
        1024
    )
    random_range_ratio: Annotated[
        float,
        Option(
            DATASET,
            "Lengths are drawn uniformly between this share of the maximum and the maximum; with 1"
            " they are all equal.",
            metavar="SHARE",
            low=0,
            high=1,
        ),
    ] = 0.0
    sharegpt_output_len: Annotated[
        int | None,
        Option(
            DATASET, "Tokens of each answer; as many as in the recorded answer if not given.", low=1
        ),
    ] = None
    sharegpt_context_len: Annotated[
        int | None,
        Option(
            DATASET,
            "Leave out conversations whose prompt and answer together are longer than this.",
            metavar="N",
            low=2,
        ),
    ] = None
    gsp_num_groups: Annotated[
        int, Option(DATASET, "Number of groups of generated-shared-prefix.", low=1)
    ] = 64
    gsp_prompts_per_group: Annotated[int, Option(DATASET, "Prompts in each group.", low=1)] = 16
    gsp_system_prompt_len: Annotated[
        int, Option(DATASET, "Tokens that the prompts of a group share.", low=1)
    ] = 2048
    gsp_question_len: Annotated[
        int, Option(DATASET, "Tokens of each prompt after the shared ones.", low=1)
    ] = 128
    gsp_output_len: Annotated[int, Option(DATASET, "Tokens of each answer.", low=1)] = 256
    disable_ignore_eos: Annotated[
        bool,
        Option(
            DATASET,
            "Let the model end its answers; otherwise every answer has the requested length.",
        ),
    ] = False
    output_file: Annotated[
        str | None,
        Option(RESULTS, "File of JSON lines to which the result is appended.", metavar="FILE"),
    ] = None
    compare: Annotated[
        str | None,
        Option(
            RESULTS,
            "File with results to compare these with. Several lines, there or in --output-file,"
            " count as several runs.",
            metavar="FILE",
        ),
    ] = None


class OfflineOptions(DatasetOptions, frozen=True, kw_only=True):
    """The options of ``setpoint bench offline``, in addition to the engine's."""

    skip_warmup: Annotated[
        bool, Option(DATASET, "Measure a fresh engine, without warm-up requests.")
    ] = False


OURS = frozenset({"--breakdown", "--compare", "--plot", "--stall-timeout"})
"""Flags that SGLang's benchmark tools do not have."""
