"""The public surface equals a checked-in snapshot, so that no flag, route or name appears or
vanishes by accident.

After a deliberate change: ``python tests/arch/test_public_surface.py`` writes the snapshot anew;
review the difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import setpoint
from setpoint.config.commands import COMMANDS
from setpoint.config.environment import ENV_FIELDS
from setpoint.config.options import OPTION_FIELDS
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.fake_engine import FixedOptions

SNAPSHOT = Path(__file__).with_name("public_surface.json")


def surface() -> dict[str, Any]:
    config = FrontendConfig(
        model_path="m",
        served_model_name="m",
        tokenizer_path="m",
        context_len=64,
        max_req_input_len=60,
        vocab_size=300,
    )
    app = create_app(
        compose(
            config, EngineClient(), TextProcessor(Tokenizer(make_byte_tokenizer())), FixedOptions()
        ),
        DIALECTS,
    )
    routes = {
        f"{method} {route.path}"
        for route in app.routes
        for method in route.methods
        if method != "HEAD"
    }
    return {
        "package": setpoint.__all__,
        "flags": [field.flag for field in OPTION_FIELDS],
        "commands": {
            name: [field.flag for field in command.own_fields] for name, command in COMMANDS.items()
        },
        "environment": [field.about.name for field in ENV_FIELDS],
        "routes": sorted(routes),
        "sampling_params": list(SamplingParams.__struct_fields__),
    }


def test_public_surface_is_the_snapshot() -> None:
    assert surface() == json.loads(SNAPSHOT.read_text())


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1) + "\n")
