"""Unmodified smg in front of prefill and decode servers: the answers of one server."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import PATIENCE_S, free_port, running_server, wait_until
from setpoint_testing.tiny_models import write_tiny_llama

GREEDY = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
TEXT = "What two servers compute. " * 4


def bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    openai = {"model": model, "max_tokens": 12, "ignore_eos": True}
    chat = [{"role": "user", "content": "hello"}]
    sampled = {"temperature": 1, "sampling_seed": 5, "max_new_tokens": 20}
    return [
        *(("/generate", {"text": f"{i} {TEXT}", "sampling_params": GREEDY}) for i in range(4)),
        ("/generate", {"text": TEXT, "sampling_params": sampled}),
        (
            "/generate",
            {
                "text": TEXT,
                "sampling_params": GREEDY,
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        ),
        ("/v1/completions", {**openai, "prompt": TEXT, "temperature": 0}),
        ("/v1/completions", {**openai, "prompt": TEXT, "seed": 3, "n": 2}),
        ("/v1/chat/completions", {**openai, "messages": chat, "temperature": 0}),
    ]


def essence(answer: dict[str, Any]) -> Any:
    """What must be equal."""
    if "choices" in answer:
        return [each.get("text") or each["message"]["content"] for each in answer["choices"]]
    meta = answer["meta_info"]
    logprobs = [meta.get(f"{part}_token_logprobs", []) for part in ("input", "output")]
    return answer["text"], [[token for _, token, _ in found] for found in logprobs]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readiness").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.full
@pytest.mark.parametrize("num_pairs", [1, 2])
def test_smg_in_front(
    num_pairs: int, make_environment: Callable[[str], Path], tmp_path: Path
) -> None:
    model = write_tiny_llama(
        tmp_path / "model", vocab_size=VOCAB_SIZE, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
    write_byte_tokenizer(model)
    common = ("--model-path", str(model), "--dtype", "float32", "--num-threads", "1")
    smg = make_environment("smg").parent / "smg"
    with ExitStack() as stack:
        own = ("--enable-metrics", "--disaggregation-mode")
        command = [str(smg), "launch", "--pd-disaggregation", "--disable-retries"]
        decode = []
        for number in range(num_pairs):
            port = str(free_port())
            options = (*common, *own, "prefill", "--disaggregation-bootstrap-port", port)
            server = stack.enter_context(running_server(tmp_path / f"p{number}", *options))
            command += ["--prefill", server.url, port]
            options = (*common, *own, "decode")
            decode.append(stack.enter_context(running_server(tmp_path / f"d{number}", *options)))
            command += ["--decode", decode[-1].url]
        alone = stack.enter_context(running_server(tmp_path / "alone", *common))
        url = f"http://127.0.0.1:{(port_of_router := free_port())}"
        command += ["--host", "127.0.0.1", "--port", str(port_of_router)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        router = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(router.terminate)
        wait_until(lambda: is_ready(url))
        for path, body in bodies(str(model)):
            found, expected = (
                httpx.post(where + path, json=body, timeout=PATIENCE_S)
                for where in (url, alone.url)
            )
            assert found.status_code == 200, found.text
            assert essence(found.json()) == essence(expected.json())
        body = {"model": str(model), "prompt": TEXT, "temperature": 0, "max_tokens": 12}
        streamed = httpx.post(
            f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE_S
        )
        pieces = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        expected = httpx.post(f"{alone.url}/v1/completions", json=body, timeout=PATIENCE_S)
        text = "".join(json.loads(each)["choices"][0]["text"] for each in pieces)
        assert text == expected.json()["choices"][0]["text"]
        for server in decode:
            page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
            assert "sglang:num_transfer_failed_reqs_total" not in page or all(
                line.endswith(" 0.0")
                for line in page.splitlines()
                if line.startswith("sglang:num_transfer_failed_reqs_total{")
            )


@pytest.mark.full
def test_a_conversation_through_smg_is_loaded_from_the_storage(
    make_environment: Callable[[str], Path], tmp_path: Path
) -> None:
    """The next turn's prompt has the answer, which only the decode server has computed."""
    model = write_tiny_llama(
        tmp_path / "model",
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=4096,
    )
    write_byte_tokenizer(model)
    common = ("--model-path", str(model), "--dtype", "float32", "--num-threads", "1")
    extra = {"path": str(tmp_path / "cache"), "block_tokens": 16, "prefetch_threshold": 32}
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--disaggregation-mode"),
    )
    smg, port, own_port = make_environment("smg").parent / "smg", free_port(), free_port()
    offload = "--disaggregation-decode-enable-offload-kvcache"
    at = ("--disaggregation-bootstrap-port", str(port))
    with (
        running_server(tmp_path / "p", *common, *tiers, "prefill", *at) as prefill,
        running_server(tmp_path / "d", *common, *tiers, "decode", offload) as decode,
        running_server(tmp_path / "alone", *common) as alone,
        subprocess.Popen(
            [
                *(str(smg), "launch", "--pd-disaggregation", "--disable-retries"),
                *("--prefill", prefill.url, str(port), "--decode", decode.url),
                *("--host", "127.0.0.1", "--port", str(own_port), "--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(free_port())),
            ],
            stdout=subprocess.DEVNULL,
        ) as router,
    ):
        try:
            url = f"http://127.0.0.1:{own_port}"
            wait_until(lambda: is_ready(url))
            for name, sampling in (
                ("greedy", GREEDY | {"max_new_tokens": 70}),
                ("sampled", {"temperature": 1, "sampling_seed": 5, "max_new_tokens": 70}),
            ):
                rng = random.Random(name)
                history = [rng.randrange(3, 200) for _ in range(150)]
                for turn in range(2):
                    body = {
                        "input_ids": history,
                        "sampling_params": {**sampling, "ignore_eos": True},
                    }
                    found = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S).json()
                    assert found["output_ids"] == alone.generate(**body)["output_ids"]
                    stored = found["meta_info"]["cached_tokens_details"]["storage"]
                    assert (stored > 0) == (turn > 0), name
                    wait_until(lambda: prefill.is_idle() and decode.is_idle())
                    history += [*found["output_ids"], 5, 6, 7]
        finally:
            router.terminate()
