"""Ranks with whole experts (--ep-size) behind a server: the answers of one process, while experts are
placed anew, when a rank dies, and with other weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_recovery import all_ready, get, post, states, streams
from test_tensor_parallel import ranks_of, run, serving

from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.goldens import tiny_config
from setpoint_testing.server_process import ServerProcess, wait_until

RANKS = ("--tp-size", "2", "--ep-size", "2")
BALANCED = (*RANKS, "--ep-num-redundant-experts", "2", "--enable-eplb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    config = tiny_config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        max_position_embeddings=4096,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    write_byte_tokenizer(write_tiny(folder / "0", config))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process answers."""
    with serving(folder, tmp_path_factory.mktemp("alone")) as server:
        found = streams(server, lambda: None)
        experts = states(server)[0]["experts"]
        assert experts["num_tokens"] > 1000
        assert (experts["num_experts"], len(experts["rank_tokens"])) == (8, 1)
        return found


@pytest.mark.full
def test_experts_are_balanced_while_streams_go_on(
    folder: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    every = ("--eplb-rebalance-num-iterations", "10", "--enable-metrics")
    with serving(folder, tmp_path, *BALANCED, *every) as server:
        for _ in range(3):
            assert streams(server, lambda: None) == alone
        experts = states(server)[0]["experts"]
        assert experts["num_rebalances"] > 1
        assert len(experts["rank_tokens"]) == 2
        assert "TP0] Experts are placed anew in" in server.errors
        page = get(server, "/metrics").text
        for name in ("sglang:eplb_balancedness{", "setpoint:expert_rank_tokens{"):
            assert name in page
        assert post(server, "/release_memory_occupation").status_code == 200
        assert states(server)[0].get("experts") is None
        assert post(server, "/resume_memory_occupation").status_code == 200
        assert streams(server, lambda: None) == alone


@pytest.mark.full
def test_streams_go_on_when_a_rank_ends(
    folder: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    with serving(folder, tmp_path, *RANKS, "--moe-dense-tp-size", "1") as server:

        def disturb() -> None:
            wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
            os.kill(ranks_of(server)[0].pid, signal.SIGKILL)

        assert streams(server, disturb) == alone
        assert "has ended: SIGKILL. The engine ends." in server.errors
        all_ready(server, 1)
        assert one_rank(server)


def one_rank(server: ServerProcess) -> bool:
    return len(ranks_of(server)) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--tp-size", "2", "--ep-size", "4"),
            "--ep-size 4 must be 1 or the number of ranks, --tp-size 2",
        ),
        (
            (*RANKS, "--ep-num-redundant-experts", "1"),
            "--ep-size 2 cannot divide 8 experts and 1 redundant ones evenly",
        ),
        (
            (*RANKS, "--init-expert-location", "/nowhere.json"),
            "--init-expert-location /nowhere.json cannot be read",
        ),
        (("--moe-a2a-backend", "deepep"), "--moe-a2a-backend deepep is not supported"),
    ],
)
def test_refused(folder: Path, options: tuple[str, ...], message: str) -> None:
    done = run("--model-path", str(folder / "0"), *options)
    assert done.returncode == 2
    assert message in done.stderr
