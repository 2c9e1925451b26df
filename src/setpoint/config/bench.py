"""The options of ``setpoint bench``: SGLang's names for what its benchmark tools have, and a few of
Setpoint's own."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

DATASET = "Dataset"
RESULTS = "Results"

DATASETS = ("random", "random-ids", "generated-shared-prefix", "sharegpt", "custom")


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the prompts to send and the answers to ask for, shared by all benchmarks that send
    prompts."""

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
            DATASET,
            "Tokens of each answer. If not given, each has as many as the recorded answer.",
            low=1,
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
            "File with earlier results, with which these are compared. Several lines in that"
            " file or in --output-file count as several runs.",
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


TARGET = "Server"
TRAFFIC = "Traffic"
BACKENDS = (
    "sglang",
    "sglang-native",
    "sglang-oai",
    "sglang-oai-chat",
    "sglang-embedding",
    "vllm",
    "vllm-chat",
    "vllm-embedding",
)


class ServingOptions(DatasetOptions, frozen=True, kw_only=True):
    """The options of ``setpoint bench serving``."""

    backend: Annotated[
        str,
        Option(
            TARGET,
            "API to use: SGLang's /generate, or OpenAI's completions, chat or embeddings.",
            choices=BACKENDS,
        ),
    ] = "sglang"
    base_url: Annotated[
        str | None,
        Option(
            TARGET,
            "Address of the server, http(s)://HOST:PORT, instead of --host and --port.",
            metavar="URL",
        ),
    ] = None
    host: Annotated[str, Option(TARGET, "Host of the server.")] = "127.0.0.1"
    port: Annotated[int, Option(TARGET, "Port of the server.", low=1, high=65535)] = 30000
    model: Annotated[
        str | None,
        Option(TARGET, "Model name to send. If not given, the first one that the server lists."),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            TARGET,
            "Folder, GGUF file or hub id of the tokenizer. If not given, the tokenizer that the"
            " server names, or otherwise the model's.",
            metavar="PATH",
        ),
    ] = None
    request_rate: Annotated[
        float,
        Option(
            TRAFFIC,
            "Requests per second; they arrive as a Poisson process. inf sends all at once.",
            metavar="X",
            infinite=True,
        ),
    ] = float("inf")
    max_concurrency: Annotated[
        int | None,
        Option(
            TRAFFIC,
            "Maximum requests in flight; the others wait in this client, and their wait is not"
            " measured.",
            low=1,
        ),
    ] = None
    warmup_requests: Annotated[
        int, Option(TRAFFIC, "Warm-up requests before the measured ones.", low=0)
    ] = 1
    flush_cache: Annotated[
        bool, Option(TRAFFIC, "Empty the server's prefix cache after the warm-up.")
    ] = False
    disable_stream: Annotated[
        bool,
        Option(
            TRAFFIC,
            "Ask for whole answers instead of streams; only the end of an answer can then be"
            " timed.",
        ),
    ] = False
    stall_timeout: Annotated[
        float,
        Option(
            TRAFFIC, "Seconds without any data after which a request counts as failed.", low=0.1
        ),
    ] = 1800.0
    extra_request_body: Annotated[
        str, Option(TRAFFIC, "JSON object whose keys are added to every request.", metavar="JSON")
    ] = "{}"
    apply_chat_template: Annotated[
        bool, Option(DATASET, "Apply the model's chat template to the prompts in this client.")
    ] = False
    tokenize_prompt: Annotated[
        bool,
        Option(DATASET, "Send token ids instead of text, so that the number of tokens is exact."),
    ] = False
    goodput: Annotated[
        tuple[str, ...],
        Option(
            RESULTS,
            "Limits in milliseconds within which a request counts as good: ttft:MS, tpot:MS,"
            " e2el:MS.",
            metavar="NAME:MS",
        ),
    ] = ()
    cache_report: Annotated[
        bool, Option(RESULTS, "Report the prompt tokens that came from the server's prefix cache.")
    ] = False
    output_details: Annotated[
        bool, Option(RESULTS, "Write every request's lengths, times and text to the output file.")
    ] = False
    plot_throughput: Annotated[
        bool, Option(RESULTS, "Draw throughput and concurrency over time in the terminal.")
    ] = False
    plot: Annotated[
        str | None,
        Option(
            RESULTS,
            "Draw throughput, requests in flight and the distribution of latencies to an SVG file.",
            metavar="FILE",
        ),
    ] = None
    tag: Annotated[str | None, Option(RESULTS, "A name for this run, kept in the result.")] = None


BATCH = "Batch"


class OneBatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint bench one-batch``, in addition to the engine's. Every combination
    of the three lists is measured."""

    batch_size: Annotated[
        tuple[int, ...], Option(BATCH, "Number of sequences in the batch.", metavar="N", low=1)
    ] = (1,)
    input_len: Annotated[
        tuple[int, ...], Option(BATCH, "Tokens of each prompt.", metavar="N", low=1)
    ] = (1024,)
    output_len: Annotated[
        tuple[int, ...],
        Option(BATCH, "Tokens that each sequence generates, one per step.", metavar="N", low=2),
    ] = (16,)
    breakdown: Annotated[
        bool,
        Option(
            BATCH,
            "Show how much time each part of a step takes, and how fast it could be on this"
            " machine. The limits of the machine are measured.",
        ),
    ] = False
    run_name: Annotated[str, Option(RESULTS, "A name for this run, kept in the results.")] = (
        "default"
    )
    output_file: Annotated[
        str | None,
        Option(
            RESULTS,
            "File of JSON lines to which one line per combination is appended.",
            metavar="FILE",
        ),
    ] = None
    compare: Annotated[
        str | None,
        Option(
            RESULTS,
            "Result file of an earlier run; shows the speed of each combination relative to it.",
            metavar="FILE",
        ),
    ] = None


class QualityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint bench quality``, in addition to the engine's."""

    text_file: Annotated[
        str | None,
        Option(DATASET, "UTF-8 text to predict instead of the built-in texts.", metavar="FILE"),
    ] = None
    max_perplexity_change: Annotated[
        float | None,
        Option(
            RESULTS,
            "Exit with code 3 if the perplexity rises by more than this share (0.02 is 2 %).",
            metavar="SHARE",
            low=0,
        ),
    ] = None
    output_file: Annotated[
        str | None,
        Option(RESULTS, "File of JSON lines to which the result is appended.", metavar="FILE"),
    ] = None
