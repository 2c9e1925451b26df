"""``python -m setpoint.launch.child LINK NUMBER [INHERITED..]``: the engine process, with the other
ranks of its model on this machine, NUMBER with itself. They are started first, so that all of them
import torch at the same time. INHERITED: see ``launch.lockstep_memory``.

Importing torch makes hundreds of thousands of objects, all of which stay. The garbage collector
would scan them again and again and take a fifth of the import's time, so it is off during the
import and never scans them later.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()
    from setpoint.launch.ranks import start_ranks

    others = range(1, int(sys.argv[2]))
    ranks = start_ranks(others, others) if others else None
    from setpoint.launch.child.engine_process import main
    from setpoint.launch.deadline import leave

    gc.freeze()
    gc.enable()
    leave(main(ranks, [int(each) for each in sys.argv[3:]]))
