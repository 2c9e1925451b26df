"""Turns the tree of a structural tag into Lark rules for llguidance.

What consists of fixed strings and regular expressions only becomes one terminal: a terminal is
matched as a whole, whereas a rule takes the longest match of each of its terminals and never goes
back. Text of unknown length becomes a lazy terminal that ends with the string that must follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from llguidance import LLMatcher, regex_to_lark

from setpoint.core.errors import RequestError
from setpoint.grammar import tags
from setpoint.grammar.schema import JsonSpacing, llguidance_schema
from setpoint.grammar.tags import Format
from setpoint.schemas.document import DEFINITIONS
from setpoint.schemas.expressions import for_grammars
from setpoint.schemas.xml_parameters import is_free_text, not_enforced

_ANY = "/(?s:.*)/"
_SPACE = r"/[ \n\t]{0,16}/"

NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""A line of every Lark grammar. Without it the library writes down all that must follow before
it makes a mask, and never returns where text is forced without end: start: A "b" with A: "b"+."""

MAX_CHARS = 8 << 20
"""Longest definition that is written, in characters. What definitions of a schema have in common is
written for each parameter in the style qwen_xml, so a definition can be much longer than its tag.
"""


def as_terminal(expression: str) -> str:
    """A regular expression as it stands between slashes in Lark, where ``\\d`` and ``\\w`` are the
    characters of ASCII that JSON Schema means by them; to the library they are Unicode's. Raises
    RequestError (400)."""
    return regex_to_lark(for_grammars(expression), "dw")


def lark_of(
    tree: Format,
    special_tokens: Mapping[str, int],
    spacing: JsonSpacing,
    ebnf: Callable[[str], str],
) -> str:
    """The Lark grammar of a structural tag.

    special_tokens: tokens that text cannot produce, by name; a fixed string that contains one asks
    for that token. ebnf: makes a Lark grammar of a client's grammar. Raises RequestError (400).
    """
    writer = _Writer(special_tokens, spacing, ebnf)
    start = writer.expression(tree)
    lark = NO_FORCING + "\n".join([f"start: {start}", *writer.rules])
    grammars = [{"lark_grammar": lark}, *writer.grammars]
    return json.dumps({"grammars": grammars})


@dataclass(slots=True)
class _Writer:
    special_tokens: Mapping[str, int]
    spacing: JsonSpacing
    ebnf: Callable[[str], str]
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)
    """Clients' own grammars, to which rules refer by name."""
    insides: dict[int, str] = field(default_factory=dict)
    """id of a tag -> what matches it after its ``begin``; written once, because tags inside each
    other would otherwise double it at every level."""
    num_chars: int = 0

    def expression(self, node: Format) -> str:
        """The right side of a rule that matches the format."""
        terminal = self._terminal(node)
        if terminal is not None:
            return self._named_terminal(terminal)
        match node:
            case tags.AnyText(excludes):
                return self._named_terminal(_text(excludes))
            case tags.ConstString(value):
                return self._literal(value)
            case tags.JsonSchema(schema, style):
                return self._parameters(schema) if style == "qwen_xml" else self._json(schema)
            case tags.ParameterXml(schema):
                return self._parameters(schema)
            case tags.GrammarFormat(text):
                name = f"client_{len(self.grammars)}"
                self.grammars.append({"name": name, "lark_grammar": self.ebnf(text)})
                return f"@{name}"
            case tags.Or(elements):
                return _one_of([self.expression(each) for each in elements])
            case tags.SequenceFormat(elements):
                return self._sequence(elements)
            case tags.Optional(content):
                return f"({self.expression(content)})?"
            case tags.Star(content):
                return f"({self.expression(content)})*"
            case tags.Plus(content):
                return f"({self.expression(content)})+"
            case tags.Tag(begin):
                return f"{self._literal(begin)} {self._rest_of_tag(node, len(begin))}"
            case tags.TriggeredTags():
                return self._triggered(node)
            case tags.TagsWithSeparator():
                return self._separated(node)
        raise AssertionError(node)

    def _terminal(self, node: Format) -> str | None:
        """The body of a terminal that matches the format; None if no regular expression does."""
        match node:
            case tags.ConstString(value) if not self._specials_in(value):
                return json.dumps(value)
            case tags.Regex(pattern):
                return f"/{as_terminal(pattern)}/"
            case tags.Or(elements):
                parts = [self._terminal(each) for each in elements]
                return None if None in parts else _one_of([part for part in parts if part])
            case tags.SequenceFormat(elements):
                parts = [self._terminal(each) for each in elements]
                return None if None in parts else " ".join(part for part in parts if part)
            case tags.Optional(content) | tags.Star(content) | tags.Plus(content):
                part = self._terminal(content)
                sign = {tags.Optional: "?", tags.Star: "*"}.get(type(node), "+")
                return None if part is None else f"({part}){sign}"
            case tags.Tag(begin, content):
                part = self._terminal(content)
                if part is None or self._specials_in(begin, *node.ends):
                    return None
                ends = _one_of([json.dumps(end) for end in node.ends])
                return f"{json.dumps(begin)} ({part}) {ends}"
        return None

    def _rest_of_tag(self, tag: tags.Tag, num_matched: int) -> str:
        """What matches a tag after the first ``num_matched`` characters of its ``begin``."""
        inside = self.insides.get(id(tag))
        if inside is None:
            inside = self.insides[id(tag)] = self._inside(tag)
        begin = tag.begin[num_matched:]
        return f"{self._literal(begin)} {inside}" if begin else inside

    def _inside(self, tag: tags.Tag) -> str:
        """The content and the end of a tag."""
        content = self._terminal(tag.content)
        if isinstance(tag.content, tags.AnyText):
            return self._text_until(tag.ends, tag.content.excludes)
        if content is not None and not self._specials_in(*tag.ends):
            ends = _one_of([json.dumps(end) for end in tag.ends])
            return self._named_terminal(f"({content}) {ends}")
        end = _one_of([self._literal(each) for each in tag.ends])
        return f"({self.expression(tag.content)}) {end}"

    def _sequence(self, elements: list[Format]) -> str:
        parts, index = [], 0
        while index < len(elements):
            node, rest = elements[index], elements[index + 1 :]
            if not isinstance(node, tags.AnyText) or not rest:
                parts.append(f"({self.expression(node)})")
                index += 1
                continue
            match rest[0]:
                case tags.ConstString(value):
                    parts.append(self._text_until([value], node.excludes))
                case tags.Tag(begin) as tag:
                    parts.append(self._text_until([begin], node.excludes))
                    parts.append(self._rest_of_tag(tag, len(begin)))
                case _:
                    raise RequestError(
                        "structural_tag: any_text in a sequence must be its last element, or be"
                        " followed by a const_string or a tag, which shows where the text ends."
                    )
            index += 2
        return " ".join(parts)

    def _triggered(self, node: tags.TriggeredTags) -> str:
        dispatched = []
        for trigger in node.triggers:
            matching = [tag for tag in node.tags if tag.begin.startswith(trigger)]
            if matching:
                choices = _one_of([self._rest_of_tag(tag, len(trigger)) for tag in matching])
                dispatched.append(f"{self._text_until([trigger], node.excludes)} {choices}")
        tag = self._named_rule(_one_of(dispatched))
        text = self._named_terminal(_text(node.excludes))
        first = _one_of([self.expression(each) for each in node.tags]) if node.at_least_one else ""
        if node.stop_after_first:
            return first if node.at_least_one else _one_of([tag, text])
        return f"{first} {tag}* {text}" if node.at_least_one else f"{tag}* {text}"

    def _separated(self, node: tags.TagsWithSeparator) -> str:
        tag = self._named_rule(_one_of([self.expression(each) for each in node.tags]))
        more = "" if node.stop_after_first else f" ({self._literal(node.separator)} {tag})*"
        return f"{tag}{more}" if node.at_least_one else f"({tag}{more})?"

    def _parameters(self, schema: bool | dict[str, Any]) -> str:
        """The properties of an object in the order of its schema, each between XML tags: strings as
        they are, everything else as JSON."""
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        if not isinstance(schema, dict) or not isinstance(properties, dict):
            raise RequestError("structural_tag: the style qwen_xml needs the schema of an object.")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise RequestError("structural_tag: required must be a list of strings.")
        names = set(required)
        definitions: dict[str, Any] = {key: schema[key] for key in DEFINITIONS if key in schema}
        space = self._named_terminal(_SPACE)
        parts = []
        for name, each in properties.items():
            head, tail = json.dumps(f"<parameter={name}>"), '"</parameter>"'
            listed = isinstance(each, dict) and each.get("enum", [each.get("const")])
            if is_free_text(each):
                if any(not_enforced({"properties": {name: each}})):
                    self._check({**definitions, **each})
                value = self._text_until(["</parameter>"], [])
            elif _only_strings(listed):
                choices = _one_of([json.dumps(choice) for choice in listed])
                value = self._named_terminal(f"{_SPACE} {choices} {_SPACE} {tail}")
            else:
                inner = {**definitions, **each} if isinstance(each, dict) else each
                value = f"{space} {self._json(inner)} {space} {tail}"
            sign = "" if name in names else "?"
            parts.append(f"({space} {head} {value}){sign}")
        return " ".join([*parts, space])

    def _text_until(self, ends: list[str], excludes: list[str]) -> str:
        """Text, up to and with the first of these strings."""
        if "" in ends:
            return self._named_terminal(_text(excludes))
        specials = [end for end in ends if self._specials_in(end)]
        choices = []
        if specials:
            text = self._named_terminal(_text(excludes))
            choices += [f"{text} {self._literal(end)}" for end in specials]
        plain = [json.dumps(end) for end in ends if end not in specials]
        if plain:
            name = self._named_rule(f"({_text(excludes)}) {_one_of(plain)}", lazy=True)
            choices.append(name)
        return _one_of(choices)

    def _literal(self, text: str) -> str:
        """A fixed string; special tokens in it stand for themselves."""
        if not self._specials_in(text):
            return json.dumps(text) if text else '""'
        pattern = "|".join(
            re.escape(token) for token in sorted(self.special_tokens, key=len, reverse=True)
        )
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{self.special_tokens[part]}]>" if part in self.special_tokens else json.dumps(part)
            for part in parts
            if part
        )

    def _specials_in(self, *texts: str) -> bool:
        return any(token in text for text in texts for token in self.special_tokens)

    def _json(self, schema: bool | dict[str, Any]) -> str:
        body = f"%json {json.dumps(llguidance_schema(schema, self.spacing))}"
        self._count(body)
        return body

    def _check(self, schema: dict[str, Any]) -> None:
        """Raise RequestError (400) for a schema that cannot be compiled."""
        lark = f"start: {self._json(schema)}"
        if why := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark)):
            raise RequestError(why)

    def _count(self, body: str) -> None:
        self.num_chars += len(body)
        if self.num_chars > MAX_CHARS:
            raise RequestError(
                f"structural_tag makes a grammar of more than {MAX_CHARS} characters."
            )

    def _named_terminal(self, body: str) -> str:
        self._count(body)
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _named_rule(self, body: str, *, lazy: bool = False) -> str:
        self._count(body)
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _text(excludes: list[str]) -> str:
    """The body of a terminal for text without these strings."""
    if not excludes:
        return _ANY
    found = _one_of([json.dumps(each) for each in excludes])
    return f"{_ANY} & ~({_ANY} {found} {_ANY})"


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _only_strings(values: Any) -> TypeGuard[list[str]]:
    return (
        isinstance(values, list) and bool(values) and all(isinstance(each, str) for each in values)
    )
