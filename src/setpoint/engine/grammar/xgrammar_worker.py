"""``python -m setpoint.engine.grammar.xgrammar_worker FOLDER VOCAB_SIZE MAX_WHITESPACE [END_ID
...]``: the process that forks the processes which run xgrammar. FOLDER has the tokenizer; standard
input is a socket.
"""

from __future__ import annotations

import socket
import sys

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.engine.grammar.xgrammar_compiler import XgrammarCompiler
from setpoint.grammar.process_server import CompiledConstraint, Compiler, serve_forks
from setpoint.grammar.vocabulary import Vocabulary


def main() -> None:
    folder, vocab_size, max_whitespace, *ends = sys.argv[1:]
    vocabulary = Vocabulary(
        folder, vocab_size=int(vocab_size), eos_token_ids=[int(each) for each in ends]
    )
    serve_forks(
        socket.socket(fileno=sys.stdin.fileno()),
        _compiler(vocabulary, int(max_whitespace)),
        vocab_size=vocabulary.size,
    )


def _compiler(vocabulary: Vocabulary, max_whitespace: int) -> Compiler:
    try:
        return XgrammarCompiler(vocabulary, max_whitespace)
    except RequestError as error:
        unusable = error

    def refusing(constraint: Constraint) -> CompiledConstraint:
        raise unusable

    return refusing


if __name__ == "__main__":
    main()
