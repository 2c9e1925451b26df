"""The commands of SGLang's tuning guides, started for real with the default model, and each
answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.hardware import probe_hardware
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.guide_commands import GUIDE_COMMANDS
from setpoint_testing.server_process import running_server
from setpoint_testing.tiny_models import write_tiny_llama

ACCEPTED = {
    tuple(command.argv(model="")): command for command in GUIDE_COMMANDS if not command.refused
}
ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
ALL_DOCUMENTED = (
    "--trust-remote-code",
    "--tp",
    "1",
    "--attn-cp-size",
    "1",
    "--enable-overlap-scheduler",
)


MULTIPLES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes of a model that can be quantized to 8 bits: multiples of 32."""


@pytest.mark.full
@pytest.mark.parametrize("argv", [*ACCEPTED, ALL_DOCUMENTED], ids=" ".join)
def test_a_command_of_the_guides_serves(argv: tuple[str, ...], tmp_path: Path) -> None:
    if "--dp-size" in argv and int(argv[argv.index("--dp-size") + 1]) > probe_hardware().num_cores:
        pytest.skip("this machine has fewer cores than engines")
    model: tuple[str, ...] = ()
    if "--quantization" in argv:  # the weights of the default model are quantized already
        folder = write_tiny_llama(tmp_path / "model", **MULTIPLES)
        write_byte_tokenizer(folder)
        model = ("--model-path", str(folder))
    with running_server(tmp_path, *argv, *model) as server:
        answer = server.generate(
            text="The capital of France is",
            sampling_params={"max_new_tokens": 3, "temperature": 0},
            # What a decode server needs for a request that no other server knows of.
            **(ALONE if "--disaggregation-mode" in argv else {}),
        )
        assert answer["meta_info"]["completion_tokens"] == 3
        assert model or "Paris" in answer["text"]
        without_effect = (
            ACCEPTED[argv].without_effect
            if argv in ACCEPTED
            else ("trust_remote_code", "enable_overlap_scheduler")
        )
        for field in without_effect:
            assert f"WARNING: Decision: {field}=" in server.errors
        assert ("Decision: attn_cp_size=1 (given; it is SGLang's default" in server.errors) == (
            "--attn-cp-size" in argv
        )
