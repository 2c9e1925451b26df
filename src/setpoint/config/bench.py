"""The options of ``setpoint bench``: SGLang's names for what its benchmark tools have, and a few of ours."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.declare import Option

TARGET = "Server"
TRAFFIC = "Traffic"
DATASET = "Dataset"
RESULTS = "Results"
BATCH = "Batch"

BACKENDS = ("sglang", "sglang-native", "sglang-oai", "sglang-oai-chat", "sglang-embedding", "vllm", "vllm-chat", "vllm-embedding")
DATASETS = ("random", "random-ids", "generated-shared-prefix", "sharegpt", "custom")


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Shared by the benchmarks that send prompts."""

    dataset_name: Annotated[
        str,
        Option(
            DATASET,
            "random: words of the tokenizer's vocabulary; random-ids: any of its ids; generated-shared-prefix: groups of prompts that "
            "begin alike; sharegpt and custom: read from --dataset-path.",
            choices=DATASETS,
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None, Option(DATASET, "ShareGPT's JSON, or JSON lines with conversations or prompt (and output_len).", metavar="FILE")
    ] = None
    num_prompts: Annotated[int, Option(DATASET, "How many requests.", low=1)] = 1000
    seed: Annotated[int, Option(DATASET, "Of prompts, lengths and arrivals: the same seed, the same traffic.", low=0)] = 42
    random_input_len: Annotated[int, Option(DATASET, "Most tokens of a random prompt.", low=1)] = 1024
    random_output_len: Annotated[int, Option(DATASET, "Most tokens of its answer.", low=1)] = 1024
    random_range_ratio: Annotated[
        float, Option(DATASET, "Lengths are uniform from this share of the most up to it; 1: all alike.", metavar="SHARE", low=0, high=1)
    ] = 0.0
    sharegpt_output_len: Annotated[
        int | None, Option(DATASET, "Answers of this length; as long as the recorded ones if not given.", low=1)
    ] = None
    sharegpt_context_len: Annotated[
        int | None, Option(DATASET, "Leave out what is longer, prompt and answer together.", metavar="N", low=2)
    ] = None
    gsp_num_groups: Annotated[int, Option(DATASET, "Groups of generated-shared-prefix.", low=1)] = 64
    gsp_prompts_per_group: Annotated[int, Option(DATASET, "Prompts in each.", low=1)] = 16
    gsp_system_prompt_len: Annotated[int, Option(DATASET, "Tokens that a group's prompts share.", low=1)] = 2048
    gsp_question_len: Annotated[int, Option(DATASET, "Tokens of each prompt's own.", low=1)] = 128
    gsp_output_len: Annotated[int, Option(DATASET, "Tokens of each answer.", low=1)] = 256
    disable_ignore_eos: Annotated[
        bool, Option(DATASET, "Let answers end where the model ends them; they have the wanted length otherwise.")
    ] = False
    output_file: Annotated[str | None, Option(RESULTS, "JSON lines; the result is appended.", metavar="FILE")] = None
    compare: Annotated[
        str | None,
        Option(
            RESULTS, "Results to set beside these, with ratios. Several lines are several runs, here and in --output-file.", metavar="FILE"
        ),
    ] = None


class OfflineOptions(DatasetOptions, frozen=True, kw_only=True):
    """``setpoint bench offline`` beside the engine's options."""

    skip_warmup: Annotated[bool, Option(DATASET, "Measure the first requests of a fresh engine, too.")] = False


class OneBatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``setpoint bench one-batch`` beside the engine's options. Every combination of the three lists is measured."""

    batch_size: Annotated[tuple[int, ...], Option(BATCH, "Sequences side by side.", metavar="N", low=1)] = (1,)
    input_len: Annotated[tuple[int, ...], Option(BATCH, "Tokens of each prompt.", metavar="N", low=1)] = (1024,)
    output_len: Annotated[tuple[int, ...], Option(BATCH, "Tokens that each gets, one per step.", metavar="N", low=2)] = (16,)
    breakdown: Annotated[
        bool, Option(BATCH, "Show where the time of a step goes, beside what the machine's own limits, measured here, would allow.")
    ] = False
    run_name: Annotated[str, Option(RESULTS, "A word of yours, kept in the results.")] = "default"
    output_file: Annotated[str | None, Option(RESULTS, "JSON lines; one per combination is appended.", metavar="FILE")] = None
    compare: Annotated[
        str | None, Option(RESULTS, "Such a file of another run: how many times as fast each combination is here.", metavar="FILE")
    ] = None


class QualityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``setpoint bench quality`` beside the engine's options."""

    text_file: Annotated[str | None, Option(DATASET, "UTF-8 text to predict, instead of the texts that come along.", metavar="FILE")] = None
    max_perplexity_change: Annotated[
        float | None,
        Option(RESULTS, "Exit with 3 if perplexity rises by more than this share; 0.02 is 2 %.", metavar="SHARE", low=0),
    ] = None
    output_file: Annotated[str | None, Option(RESULTS, "JSON lines; the result is appended.", metavar="FILE")] = None


class ServingOptions(DatasetOptions, frozen=True, kw_only=True):
    """``setpoint bench serving``."""

    backend: Annotated[
        str, Option(TARGET, "What is spoken: SGLang's /generate, or OpenAI's completions, chat or embeddings.", choices=BACKENDS)
    ] = "sglang"
    base_url: Annotated[str | None, Option(TARGET, "Instead of host and port: http://HOST:PORT, or https.", metavar="URL")] = None
    host: Annotated[str, Option(TARGET, "The server's.")] = "127.0.0.1"
    port: Annotated[int, Option(TARGET, "The server's.", low=1, high=65535)] = 30000
    model: Annotated[str | None, Option(TARGET, "Name sent to the server; its first one if not given.")] = None
    tokenizer: Annotated[
        str | None, Option(TARGET, "Folder, GGUF file or hub id; what the server names, else the model, if not given.", metavar="PATH")
    ] = None
    request_rate: Annotated[
        float, Option(TRAFFIC, "Requests per second, with a Poisson process's gaps; inf: all at once.", metavar="X", infinite=True)
    ] = float("inf")
    max_concurrency: Annotated[int | None, Option(TRAFFIC, "Most requests in flight; the others wait here, unmeasured.", low=1)] = None
    warmup_requests: Annotated[int, Option(TRAFFIC, "Requests before the measured ones.", low=0)] = 1
    flush_cache: Annotated[bool, Option(TRAFFIC, "Empty the server's prefix cache after the warm-up.")] = False
    disable_stream: Annotated[bool, Option(TRAFFIC, "Ask for whole answers: only their end can be timed then.")] = False
    stall_timeout: Annotated[float, Option(TRAFFIC, "A request with nothing received for so many seconds has failed.", low=0.1)] = 1800.0
    extra_request_body: Annotated[str, Option(TRAFFIC, "Added to every request.", metavar="JSON")] = "{}"
    apply_chat_template: Annotated[bool, Option(DATASET, "Put prompts into the model's chat template here.")] = False
    tokenize_prompt: Annotated[bool, Option(DATASET, "Send ids instead of text: the exact number of tokens.")] = False
    goodput: Annotated[
        tuple[str, ...],
        Option(RESULTS, "Limits in milliseconds that a good request keeps: ttft:MS, tpot:MS, e2el:MS.", metavar="NAME:MS"),
    ] = ()
    cache_report: Annotated[bool, Option(RESULTS, "Prompt tokens that came from the server's prefix cache.")] = False
    output_details: Annotated[bool, Option(RESULTS, "Every request's lengths, times and text in the output file.")] = False
    plot_throughput: Annotated[bool, Option(RESULTS, "Draw throughput and concurrency over time in the terminal.")] = False
    plot: Annotated[
        str | None, Option(RESULTS, "Draw throughput, requests in flight and the distribution of latencies into an SVG.", metavar="FILE")
    ] = None
    tag: Annotated[str | None, Option(RESULTS, "A word of yours, kept in the result.")] = None


OURS = frozenset({"--breakdown", "--compare", "--plot", "--stall-timeout"})
"""Flags that SGLang's benchmark tools do not have."""
