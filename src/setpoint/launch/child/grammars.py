"""Chooses the grammar library of the engine process (``--grammar-backend``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from setpoint.config.groups.execution import ExecutionOptions
from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar, GrammarFactory
from setpoint.core.model import ModelSpec
from setpoint.core.request import Request
from setpoint.grammar.schema import USUAL, JsonSpacing


class NoGrammars:
    """Implements GrammarFactory by refusing every constraint."""

    def prepare(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        return False

    def __call__(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Grammar:
        raise RequestError(
            "This server was started with --grammar-backend none, so it cannot constrain outputs"
            " (json_schema, regex, ebnf, structural_tag)."
        )


def engine_grammars(
    options: ExecutionOptions, spec: ModelSpec, tokenizer_folder: str | None
) -> GrammarFactory:
    """The grammar factory of an engine."""
    if options.grammar_backend == "none" or tokenizer_folder is None:
        return NoGrammars()
    spacing = JsonSpacing(
        options.constrained_json_max_whitespace_cnt,
        options.constrained_json_whitespace_pattern,
        options.constrained_json_disable_any_whitespace,
    )
    return grammar_factory(
        options.grammar_backend,
        tokenizer_folder,
        spacing,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
    )


def grammar_factory(
    backend: str,
    folder: str,
    spacing: JsonSpacing = USUAL,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> GrammarFactory:
    """The factory of a library for the tokenizer in the folder. Imports only what it needs."""
    if backend == "xgrammar":
        from setpoint.engine.grammar.xgrammar_factory import XgrammarFactory

        factory: GrammarFactory = XgrammarFactory(
            folder, spacing, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        return factory
    from setpoint.grammar.guidance import GuidanceFactory
    from setpoint.grammar.vocabulary import Vocabulary

    vocabulary = Vocabulary(folder, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return GuidanceFactory(vocabulary, spacing)
