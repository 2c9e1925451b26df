"""What the APIs of one model read clients' bodies with, and answer them with."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.frontend.bodies import BodyParser
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.enforcement import Enforcement
from setpoint.frontend.intake import Intake
from setpoint.frontend.job_maker import JobMaker
from setpoint.frontend.served_weights import ServedWeights
from setpoint.frontend.sessions import Sessions
from setpoint.frontend.storage.responses import ResponseStore
from setpoint.frontend.text.processor import TextProcessor
from setpoint.ipc.client import EngineClient


@dataclass(slots=True, frozen=True, repr=False)
class Answering:
    config: FrontendConfig
    engine: EngineClient
    text: TextProcessor
    weights: ServedWeights
    parser: BodyParser
    intake: Intake
    enforcement: Enforcement
    jobs: JobMaker
    sessions: Sessions
    responses: ResponseStore
