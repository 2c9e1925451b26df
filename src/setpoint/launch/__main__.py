"""``python -m setpoint.launch``: the engine process.

Importing torch makes hundreds of thousands of objects that all stay; the garbage collector, which
would look at them again and again on the way, takes a fifth of the time. So it rests meanwhile, and
never looks at them later.
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
