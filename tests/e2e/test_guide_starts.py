"""The commands of SGLang's tuning guides, started for real with the default model, and each
answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.hardware import probe_hardware
from setpoint_testing.guide_commands import GUIDE_COMMANDS
from setpoint_testing.server_process import running_server

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


@pytest.mark.full
@pytest.mark.parametrize("argv", [*ACCEPTED, ALL_DOCUMENTED], ids=" ".join)
def test_a_command_of_the_guides_serves(argv: tuple[str, ...], tmp_path: Path) -> None:
    if "--dp-size" in argv and int(argv[argv.index("--dp-size") + 1]) > probe_hardware().num_cores:
        pytest.skip("this machine has fewer cores than engines")
    with running_server(tmp_path, *argv) as server:
        answer = server.generate(
            text="The capital of France is",
            sampling_params={"max_new_tokens": 3, "temperature": 0},
            # What a decode server needs for a request that no other server knows of.
            **(ALONE if "--disaggregation-mode" in argv else {}),
        )
        assert "Paris" in answer["text"]
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
