"""Options of the benchmark that sends traffic to a server."""

from __future__ import annotations

from typing import Annotated

from setpoint.config.bench import DATASET, RESULTS, DatasetOptions
from setpoint.config.declare import Option

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
        Option(TARGET, "Model name to send; the first one that the server lists if not given."),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            TARGET,
            "Folder, GGUF file or hub id of the tokenizer; if not given, the one that the server"
            " names, or else the model's.",
            metavar="PATH",
        ),
    ] = None
    request_rate: Annotated[
        float,
        Option(
            TRAFFIC,
            "Requests per second, as a Poisson process; inf sends all at once.",
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
            TRAFFIC, "Ask for whole answers instead of streams; then only their end can be timed."
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
