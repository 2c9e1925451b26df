"""``python -m setpoint.launch.child.rank LINK MEMORY RANK``: a rank of a model but the first.

LINK and MEMORY are descriptors that it inherits. Its garbage collector is set as in
``launch.child.__main__``.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()
    from setpoint.launch.child.rank_process import main
    from setpoint.launch.deadline import leave

    gc.freeze()
    gc.enable()
    leave(main(*map(int, sys.argv[1:])))
