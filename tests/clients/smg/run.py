"""SMG, the gateway that SGLang's router became."""

from __future__ import annotations

import sys
from pathlib import Path

import routers
from checks import report

routers.LAUNCH += [str(Path(sys.executable).parent / "smg"), "launch"]
report()
