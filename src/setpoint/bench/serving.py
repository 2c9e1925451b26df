"""``setpoint bench serving``: sends traffic to a server over HTTP and measures what its clients
see.

Exit codes: 0: every request was answered; 3: some or all requests failed; 1: nothing could be
measured; 2: an option cannot be honoured.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from setpoint.bench import comparison, report
from setpoint.bench import run_metrics as metrics
from setpoint.bench.backends import BACKENDS, GenerationOptions, on_event
from setpoint.bench.bench_progress import progress, waiting
from setpoint.bench.chart import serving_chart
from setpoint.bench.emulation import refuse_emulation
from setpoint.bench.http_client import ExchangeError, HttpTarget
from setpoint.bench.paced_load import arrival_times, drive
from setpoint.bench.prompt_sets import make_prompts
from setpoint.bench.request_record import Prompt, RequestRecord
from setpoint.bench.run_metrics import Run
from setpoint.checkpoint.source import tokenizer_folder
from setpoint.config.bench import ServingOptions
from setpoint.core.errors import ConfigError, SetpointError
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.template_source import find_chat_template
from setpoint.frontend.text.tokenizer import Tokenizer

FAILED = 3
INFO_S = 30.0
"""Seconds to wait for answers that a server can give at once."""
FLUSH_S = 60.0
WARMUP_TOKENS = 32
BUSY_SHARE = 0.8
"""Share of a core. If this process's event loop spends more, it delays answers, and the measured
times are partly its own."""


_SHORTER = {
    "random": "Lower --random-input-len or --random-output-len.",
    "random-ids": "Lower --random-input-len or --random-output-len.",
    "generated-shared-prefix": (
        "Lower --gsp-system-prompt-len, --gsp-question-len or --gsp-output-len."
    ),
    "sharegpt": "Leave them out with --sharegpt-context-len.",
    "custom": "Leave them out with --sharegpt-context-len.",
}
"""Advice on prompts that are too long, by dataset."""


class BenchError(SetpointError):
    """Nothing can be measured: the server is not there, or does not answer as it should."""


def bench_serving(own: ServingOptions, *, api_key: str | None = None) -> int:
    """Measure, print and record; returns the exit code. Raises BenchError, ConfigError,
    CheckpointError."""
    bench = _Bench(own, api_key)
    report.check_writable(own.output_file)
    report.check_writable(own.plot, flag="--plot")
    previous = comparison.Comparison(own.compare) if own.compare is not None else None
    _raise_file_limit()
    import uvloop

    result = uvloop.run(bench.measure())
    report.print_serving(result, own)
    if own.output_file is not None:
        report.append(own.output_file, result)
    if previous is not None:
        print(previous.table(result, own.output_file))
    return FAILED if result["failed"] else 0


class _Bench:
    def __init__(self, own: ServingOptions, api_key: str | None) -> None:
        self._own = own
        self._backend = BACKENDS[own.backend]
        self._server = HttpTarget(own.base_url or f"http://{own.host}:{own.port}", api_key=api_key)
        self._limits = metrics.parse_goodput(own.goodput)
        self._extra = _json_object(own.extra_request_body)
        if own.request_rate <= 0:
            raise ConfigError(f"--request-rate must be above 0, or inf; got {own.request_rate:g}.")
        if own.tokenize_prompt and not self._backend.takes_ids:
            raise ConfigError(
                f"--tokenize-prompt sends token ids, which --backend {own.backend} does not accept."
            )
        if own.tokenize_prompt and own.apply_chat_template:
            raise ConfigError(
                "--apply-chat-template sends text and --tokenize-prompt sends token ids; leave one"
                " of them out."
            )
        if own.output_details and own.output_file is None:
            raise ConfigError(
                "--output-details needs a file to write to; name one with --output-file."
            )

    async def measure(self) -> dict[str, Any]:
        own = self._own
        refuse_emulation(await self._server_info())
        model = own.model or await self._first_model()
        tokenizer, folder = await self._tokenizer(model)
        with waiting(f"Making {own.num_prompts} prompts"):
            prompts = [
                self._for_backend(prompt)
                for prompt in make_prompts(own, tokenizer, as_ids=own.tokenize_prompt)
            ]
            if own.apply_chat_template:
                prompts = _apply_template(prompts, tokenizer, folder)
        await self._check_lengths(prompts, model)
        self._request_options = GenerationOptions(
            model=model,
            stream=self._streams,
            ignore_eos=not own.disable_ignore_eos,
            extra=self._extra,
        )
        with waiting(f"Warming up {self._server.url}"):
            await self._warm_up(prompts[0])
        if own.flush_cache:
            await self._flush()
        arrivals = arrival_times(len(prompts), own.request_rate, seed=own.seed)
        with progress(len(prompts)) as on_done:
            run = await drive(
                self._send, prompts, arrivals, limit=own.max_concurrency, on_done=on_done
            )
        result = self._result(run, tokenizer, await self._server_info())
        if own.plot is not None:
            report.write_plot(own.plot, serving_chart(run, result))
        return result

    @property
    def _streams(self) -> bool:
        return self._backend.generates and not self._own.disable_stream

    def _for_backend(self, prompt: Prompt) -> Prompt:
        return prompt if self._backend.generates else Prompt(prompt.content, prompt.num_tokens, 0)

    # -- requests

    async def _send(self, prompt: Prompt) -> RequestRecord:
        """Send one request. Never raises: a failure is in the record."""
        record, backend = RequestRecord(prompt), self._backend
        body = msgspec.json.encode(backend.body(prompt, self._request_options))
        record.started_at = time.perf_counter()
        try:
            answer = await self._server.post(
                backend.path,
                body,
                on_event=lambda data, now: on_event(backend, record, data, now),
                stall_s=self._own.stall_timeout,
            )
        except ExchangeError as error:
            record.fail(str(error))
        else:
            if answer.status != 200:
                record.fail(f"status {answer.status}: {_error_text(answer.body)}")
            elif answer.body:
                on_event(backend, record, answer.body, time.perf_counter())
        record.ended_at = time.perf_counter()
        if not record.is_finished:
            record.fail("the answer ended early")
        elif backend.generates and not record.times:
            if record.num_outputs:
                record.add_tokens(record.ended_at, record.num_outputs)  # tokens that have no text
            else:
                record.fail("the answer has no tokens")
        return record

    async def _warm_up(self, prompt: Prompt) -> None:
        short = Prompt(prompt.content, prompt.num_tokens, min(prompt.output_len, WARMUP_TOKENS))
        records = await asyncio.gather(
            *(self._send(short) for _ in range(self._own.warmup_requests))
        )
        for record in records:
            if record.error:
                raise BenchError(f"The warm-up of {self._server.url} failed: {record.error}")

    async def _flush(self) -> None:
        try:
            answer = await self._server.post(
                f"/flush_cache?timeout={FLUSH_S:g}", b"", stall_s=FLUSH_S + INFO_S
            )
        except ExchangeError as error:
            raise BenchError(f"{self._server.url} did not flush its cache: {error}.") from None
        if answer.status != 200:
            raise BenchError(
                f"{self._server.url} did not flush its cache: status {answer.status}:"
                f" {_error_text(answer.body)}"
            )

    # -- facts about the server

    async def _first_model(self) -> str:
        models = await self._ask("/v1/models")
        with suppress(KeyError, IndexError, TypeError):
            return str(models["data"][0]["id"])
        raise BenchError(f"{self._server.url}/v1/models lists no model; name one with --model.")

    async def _check_lengths(self, prompts: list[Prompt], model: str) -> None:
        """Raise ConfigError for prompts that this server must refuse. On the server they may be a
        little longer (special tokens, a template)."""
        info = await self._server_info()
        context_len = await self._context_len(model)
        if context_len is None or (isinstance(info, dict) and info.get("allow_auto_truncate")):
            return
        long = [prompt for prompt in prompts if prompt.num_tokens + prompt.output_len > context_len]
        if long:
            longest = max(long, key=lambda prompt: prompt.num_tokens + prompt.output_len)
            raise ConfigError(
                f"{len(long)} of {len(prompts)} prompts do not fit the context of {model}, which is"
                f" {context_len} tokens: the longest has {longest.num_tokens} tokens and asks for"
                f" {longest.output_len} more. {_SHORTER[self._own.dataset_name]}"
            )

    async def _context_len(self, model: str) -> int | None:
        """The server's context length; None if it does not say."""
        with suppress(BenchError, KeyError, TypeError):
            models = (await self._ask("/v1/models"))["data"]
            for each in sorted(
                models, key=lambda each: each["id"] != model
            ):  # a server may answer to other names too
                return int(each["max_model_len"])
        return None

    async def _tokenizer(self, model: str) -> tuple[Tokenizer, Path]:
        name = self._own.tokenizer
        if name is None:
            with suppress(BenchError):
                info = await self._ask("/model_info")
                named = info.get("tokenizer_path") if isinstance(info, dict) else None
                name = (
                    str(named) if named and Path(str(named)).is_dir() else None
                )  # otherwise it is a path on another machine
        try:
            folder = tokenizer_folder(name or model, log=print)
            return Tokenizer.from_folder(folder), folder
        except SetpointError as error:
            raise BenchError(f"{error} Name the model's tokenizer with --tokenizer.") from None

    async def _server_info(self) -> Any:
        """The server's ``/server_info``; None if it has no such route, or has gone."""
        try:
            return await self._ask("/server_info")
        except BenchError:
            return None

    async def _ask(self, path: str) -> Any:
        """Ask the server for JSON. Raises BenchError."""
        try:
            answer = await self._server.get(path, stall_s=INFO_S)
        except ExchangeError as error:
            raise BenchError(
                f"There is no answer from {self._server.url}: {error}. Check that the server runs,"
                " and name its address with --base-url."
            ) from None
        if answer.status != 200:
            raise BenchError(
                f"{self._server.url}{path} answers with status {answer.status}:"
                f" {_error_text(answer.body)}"
            )
        try:
            return msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            raise BenchError(f"{self._server.url}{path} does not answer with JSON.") from None

    # -- the outcome

    def _result(self, run: Run, tokenizer: Tokenizer, server_info: Any) -> dict[str, Any]:
        own = self._own
        retokenized = 0
        for record in run.good:
            count = len(tokenizer.encode(record.text, add_special_tokens=False))
            retokenized += count
            if record.num_outputs is None:
                record.num_outputs = count
        figures = metrics.summary(run)
        failures = metrics.failures(run)
        result = {
            "tag": own.tag,
            "backend": own.backend,
            "dataset_name": own.dataset_name,
            "request_rate": "inf" if own.request_rate == float("inf") else own.request_rate,
            "max_concurrency": own.max_concurrency,
            **figures,
            "total_input_text_tokens": figures["total_input_tokens"],
            "total_output_tokens_retokenized": retokenized,
            "accept_length": _accept_length(server_info),
            "failed": sum(failures.values()),
            "failures": failures,
            "steady_state": metrics.steady_state(run),
            "goodput": (
                {
                    "limits_ms": self._limits,
                    "request_goodput": metrics.goodput(run, self._limits),
                }
                if self._limits
                else None
            ),
            "client_cpu_share": run.cpu_s / run.duration_s,
            "client_is_bottleneck": run.cpu_s / run.duration_s >= BUSY_SHARE,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "options": {
                name: "inf" if value == float("inf") else value
                for name, value in msgspec.structs.asdict(own).items()
            },
            "server_info": server_info,
        }
        if own.cache_report:
            result |= metrics.cache_report(run)
        if own.plot_throughput:
            result["output_tokens_by_second"] = metrics.tokens_per_second(run)
            result["concurrency_by_second"] = metrics.concurrency_per_second(run)
        if own.output_details:
            result |= _details(run)
        return result


def _details(run: Run) -> dict[str, Any]:
    records = run.records
    return {
        "input_lens": [metrics.num_prompt(record) for record in records],
        "output_lens": [metrics.num_outputs(record) for record in records],
        "ttfts": [metrics.ttft_s(record) for record in records],
        "itls": [metrics.itls_s(record) for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _apply_template(prompts: list[Prompt], tokenizer: Tokenizer, folder: Path) -> list[Prompt]:
    source = find_chat_template(folder)
    if source is None:
        raise ConfigError(f"--apply-chat-template: {folder} has no chat template.")
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    texts = [template.render([{"role": "user", "content": prompt.content}]) for prompt in prompts]
    return [
        Prompt(text, len(tokenizer.encode(text, add_special_tokens=False)), prompt.output_len)
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _accept_length(server_info: Any) -> float | None:
    """Mean accepted length of speculative decoding; None without it."""
    with suppress(KeyError, IndexError, TypeError, ValueError):
        return float(server_info["internal_states"][0]["avg_spec_accept_length"])
    return None


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-request-body is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError("--extra-request-body must be a JSON object, e.g. '{\"top_k\": 1}'.")
    return found


def _error_text(body: bytes) -> str:
    """The message of an error, in each of the shapes that servers use."""
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            inner = found.get("error", found)
            return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return body.decode("utf-8", "replace")[:200].strip() or "no text"


def _raise_file_limit() -> None:
    """Raise the limit on open files: a connection is a file, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
