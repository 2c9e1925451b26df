"""Writes the strangers' part of the corpus: ``python tests/doctor_corpus/strangers.py [SEED [FOLDER]]``.

The logs are written from the formats and formulas alone, by somebody who had not read the
doctor's rules, as users of other servers would choose cases to try the doctor with.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from random import Random

import strangers_admission
import strangers_compute
import strangers_ended
import strangers_healthy
import strangers_memory
import strangers_no_memory
import strangers_too_little
import strangers_toy
import strangers_two_causes
from strangers_labels import Change, Written

HERE = Path(__file__).parent / "strangers"
SEED = 20261122
PARTS = (
    strangers_admission,
    strangers_compute,
    strangers_memory,
    strangers_no_memory,
    strangers_ended,
    strangers_healthy,
    strangers_too_little,
    strangers_two_causes,
    strangers_toy,
)
PAINTERS = tuple(painter for part in PARTS for painter in part.PAINTERS)


def written(seed: int) -> list[Written]:
    return [painter(Random(f"{seed} {painter.__name__}")) for painter in PAINTERS]


def _changes(changes: tuple[Change, ...]) -> list[dict[str, str]]:
    return [{"flag": flag, "direction": direction} for flag, direction in changes]


def write(seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for each in written(seed):
        name = f"{each.cause}-{each.variant}"
        (folder / f"{name}.log.gz").write_bytes(gzip.compress(each.text, 9, mtime=0))
        actions = _changes(each.actions)
        label = {
            "cause": each.cause,
            "acceptable": list(each.acceptable),
            "action": actions[0] if actions else None,
            "other_actions": actions[1:],
            "forbidden": _changes(each.forbidden),
            "generation": f"sglang-{each.era}",
            "made_by": f"Written by hand from the line formats, seed {seed}. {each.why}",
            "source": "written",
        }
        (folder / f"{name}.json").write_text(json.dumps(label) + "\n")


if __name__ == "__main__":
    write(
        int(sys.argv[1]) if len(sys.argv) > 1 else SEED,
        Path(sys.argv[2]) if len(sys.argv) > 2 else HERE,
    )
