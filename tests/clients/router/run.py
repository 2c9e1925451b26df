"""SGLang's router from PyPI."""

from __future__ import annotations

import sys

import routers
from checks import report

routers.LAUNCH += [sys.executable, "-m", "sglang_router.launch_router"]
report()
