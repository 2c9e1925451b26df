"""The commands that a reader might paste from a page of the documentation into a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

FENCED = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=\S)(.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")


def lines(text: str) -> Iterator[str]:
    """Yields each line of a page's code: code blocks, indented lines, and words in backticks."""
    blocks = [
        *FENCED.findall(text),
        *INDENTED.findall(text),
        *INLINE.findall(re.sub(r"```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)),
    ]
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()


def commands(text: str, *programs: str) -> Iterator[list[str]]:
    """Yields the words of each line that calls one of the programs, up to the first redirection."""
    for line in lines(text):
        if line.removeprefix(".venv/bin/").split(" ")[0] in programs:
            words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
            yield words[
                : next((at for at, word in enumerate(words) if word[0] in "<>|&"), len(words))
            ]
