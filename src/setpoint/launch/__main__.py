"""``python -m setpoint.launch LINK``: the engine process.

Importing torch makes hundreds of thousands of objects, all of which stay. The garbage collector
would scan them again and again and take a fifth of the import's time, so it is off during the
import and never scans them later.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()
    from setpoint.launch.engine_process import main

    gc.freeze()
    gc.enable()
    sys.exit(main())
