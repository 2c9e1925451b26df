"""``python check_index.py FOLDER KEY_BYTES ENTRY_BYTES``: reads a whole index of blocks, and begins
a change of it. A damaged page may end the process that reads it (SIGBUS, SIGSEGV), so this is a
process of its own. It ends with 0 if the index is as it should be, with DAMAGED if it is not."""

from __future__ import annotations

import os
import sys

import lmdb

DAMAGED = 3
SOUND_ERRORS = (lmdb.LockError, lmdb.MemoryError, lmdb.ReadersFullError, lmdb.MapFullError)
"""What says nothing about the index."""


def check(folder: str, key_bytes: int, entry_bytes: int) -> str:
    """What is wrong with an index; empty if nothing is."""
    index = lmdb.open(folder, max_dbs=2, max_readers=512, create=False, sync=False, metasync=False)
    blocks, sums = index.open_db(b"blocks"), index.open_db(b"sums")
    with index.begin() as transaction:
        for database in (None, sums):
            for _ in transaction.cursor(db=database):
                pass
        for key, entry in transaction.cursor(db=blocks):
            if len(key) != key_bytes or len(entry) != entry_bytes:
                return "it holds something else"
    with index.begin(write=True, db=blocks) as transaction:
        for _ in range(8):  # takes pages from the list of those that are free
            transaction.put(os.urandom(key_bytes), bytes(entry_bytes))
        transaction.abort()
    return ""


def main() -> int:
    folder, key_bytes, entry_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        wrong = check(folder, key_bytes, entry_bytes)
    except SOUND_ERRORS:
        return 0
    except lmdb.Error as error:
        wrong = str(error)
    if wrong:
        print(wrong)
    return DAMAGED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
