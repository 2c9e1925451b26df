"""Extreme but well-formed values of every field of every route, over real HTTP into live engines:
none ends one, none is answered 5xx.

Fields and their types come from the declared bodies, so that a new one is covered as it is; a new
route fails the first test.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from setpoint.config.options import OPTION_FIELDS
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.apis.openai.chat import ChatBody
from setpoint.frontend.apis.openai.completions import CompletionBody
from setpoint.frontend.apis.openai.embeddings import EmbeddingBody
from setpoint.frontend.apis.sglang.admin import AbortBody
from setpoint.frontend.apis.sglang.protocol import EncodeBody, GenerateBody
from setpoint.frontend.apis.sglang.routes import DetokenizeBody, TokenizeBody
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.routes import each_route
from setpoint.frontend.ipc.client import EngineClient
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.testing.byte_tokenizer import (
    BOS_ID,
    EOS_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    write_byte_tokenizer,
)
from setpoint.testing.fake_engine import FixedOptions
from setpoint.testing.server import ServerProcess, running_server
from setpoint.testing.tiny_models import write_tiny_llama

CONTEXT = 64
"""So short that whatever is asked for ends soon."""
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/generate": (GenerateBody, {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    "/encode": (EncodeBody, {"text": "a"}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/v1/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"messages": HI, "max_tokens": 2}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/abort_request": (AbortBody, {}),
}
"""Route -> its body, and what of it makes a request that runs."""
READS = ("/v1/models/{model_id:path}", "/flush_cache")
"""Routes that take values in their path or query."""
SETTINGS = "/set_internal_state"
LIVE = [field.name for field in OPTION_FIELDS if field.about.live]

POWERS = [7, 8, 15, 16, 24, 30, 31, 32, 33, 53, 62, 63, 64, 65, 128, 1024, 4096]
INTS = sorted(
    {sign * (1 << power) + near for power in POWERS for sign in (1, -1) for near in (-1, 0, 1)}
    | set(range(-2, 70))
    | {10**400}
)
FLOATS = [
    *(
        0.0,
        -0.0,
        0.5,
        1.0,
        2.0,
        1 + 2**-52,
        5e-324,
        1e-300,
        1e-45,
        2.0**-126,
        1e-38,
        1e-20,
        1e-7,
        1e-6,
    ),
    *(1e30, 3.4028235e38, 3.5e38, 1e308, -1e308, -1e-300, 1.7976931348623157e308),
]
WRITTEN_OUT = [
    f"\ue000{number}\ue000"
    for number in ("1e400", "-1e400", "1e-400", "1" + "0" * 5000, "-0", "1E+2", "0.1e1")
]
"""Numbers that Python does not write this way; ``encoded`` takes them out of their quotes."""
TEXTS = [
    "",
    "a",
    " ",
    "\x00",
    "\n",
    "x" * 300,
    "x" * 70_000,
    "\U0001f600" * 40,
    "\u202e",
    "{{ 7 }}",
    "1e400",
    "-1",
    "<|eos|>",
    "ä" * 63,
    "\\",
]

integers = st.sampled_from(INTS) | st.integers(-3, 4)
floats = st.sampled_from(FLOATS) | st.floats(allow_nan=False, allow_infinity=False)
written = st.sampled_from(WRITTEN_OUT)
texts = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.none() | st.booleans() | integers | floats | texts | written
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
) | st.sampled_from([[1] * 5000, [[1]] * 300, [[]] * 300, list(range(256)), HI, HI * 40])


def values(info: inspect.Type, name: str = "") -> st.SearchStrategy[Any]:
    """Extreme values of a declared type; now and then of another."""
    if name == "sampling_params":
        return sampling() | st.lists(sampling(), max_size=3)
    match info:
        case inspect.IntType():
            near = [
                edge + step
                for edge in (info.ge, info.le)
                if edge is not None
                for step in (-1, 0, 1)
            ]
            return integers | st.sampled_from(near) if near else integers
        case inspect.FloatType():
            return floats | integers | written
        case inspect.StrType():
            return texts
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from([*info.values, "other"])
        case inspect.UnionType():
            return st.one_of([values(option) for option in info.types])
        case inspect.ListType() | inspect.VarTupleType():
            if isinstance(
                info.item_type, inspect.TupleType
            ):  # pairs, which a client writes as an object
                return values(inspect.DictType(*info.item_type.item_types))
            each = values(info.item_type)
            return st.lists(each, max_size=4) | st.builds(
                lambda item, count: [item] * count, each, st.sampled_from([33, 70, 1001, 5000])
            )
        case inspect.DictType():
            keys = st.integers(0, VOCAB_SIZE).map(str) | st.sampled_from(INTS).map(str) | texts
            return st.dictionaries(keys, values(info.value_type), max_size=4) | st.just(
                {str(token): 1 for token in range(VOCAB_SIZE)}
            )
        case inspect.StructType():
            return fields(info.cls)
        case _:
            return anything


def fields(kind: type[msgspec.Struct], *, at_most: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a struct's fields."""
    declared = {field.encode_name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[union-attr]

    def value(name: str) -> st.SearchStrategy[Any]:
        return st.integers(0, 9).flatmap(
            lambda number: values(declared[name], name) if number else anything
        )

    pair = st.sampled_from(sorted(declared)).flatmap(
        lambda name: st.tuples(st.just(name), value(name))
    )
    return st.lists(pair, min_size=1, max_size=at_most, unique_by=lambda item: item[0]).map(dict)


def sampling() -> st.SearchStrategy[dict[str, Any]]:
    return fields(SamplingParams).map(lambda drawn: {"max_new_tokens": 2} | drawn)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Method, path with query, and body."""
    route = draw(
        st.sampled_from(
            [*BODIES, SETTINGS] * 3
            + ["/generate", "/v1/completions", "/v1/chat/completions"] * 12
            + [*READS]
        )
    )
    if route == "/flush_cache":
        timeout = draw(
            floats.map(str)
            | integers.map(str)
            | st.sampled_from(["nan", "inf", "-inf", "1e400", ""])
        )
        return "POST", f"/flush_cache?timeout={quote(timeout)}", {}
    if route == SETTINGS:
        anything = integers | floats | texts | st.booleans() | st.none()
        given_settings = st.dictionaries(st.sampled_from(LIVE), anything, max_size=3)
        return "POST", SETTINGS, {"server_args": draw(given_settings)}
    if route in READS:
        return "GET", "/v1/models/" + quote(draw(texts)[:2000], safe=""), {}
    kind, runs = BODIES[route]
    return "POST", route, runs | draw(fields(kind))


def encoded(body: Any) -> bytes:
    """JSON, with the numbers of WRITTEN_OUT as numbers."""
    return re.sub(
        '"\ue000([^\ue000"]*)\ue000"', r"\1", json.dumps(body, ensure_ascii=False)
    ).encode()


def test_every_route_that_takes_values_is_here() -> None:
    config = FrontendConfig(
        model_path="m",
        served_model_name="m",
        tokenizer_path="m",
        context_len=64,
        max_req_input_len=60,
        vocab_size=300,
    )
    app = create_app(
        Service(config, EngineClient(), TextProcessor(make_byte_tokenizer()), FixedOptions()),
        DIALECTS,
    )
    posts = {
        route.path
        for route in each_route(app.routes)
        if "POST" in (getattr(route, "methods", None) or ()) or "{" in route.path
    }
    assert posts == {*BODIES, *READS, SETTINGS}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, ServerProcess]]:
    """One that generates, one that embeds."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=CONTEXT,
    )
    write_byte_tokenizer(folder)
    home = tmp_path_factory.mktemp("servers")
    arguments = (
        "--model-path",
        str(folder),
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--max-total-tokens",
        "4096",
    )
    with (
        running_server(home / "generates", *arguments, "--strict-accounting") as generates,
        running_server(home / "embeds", *arguments, "--is-embedding") as embeds,
    ):
        yield {"generates": generates, "embeds": embeds}


def restore(http: httpx.Client, url: str, changes: list[dict[str, Any]]) -> None:
    """The settings as they were, so that the next case meets a server like the one before."""
    before = {change["option"]: change["old"] for change in changes}
    answer = http.post(url, content=json.dumps({"server_args": before}))
    assert answer.status_code == 200, (changes, answer.text)


@pytest.mark.parametrize(
    "count", [150, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_no_value_ends_an_engine_or_is_answered_5xx(
    servers: Mapping[str, ServerProcess], count: int
) -> None:
    answers: Counter[tuple[str, int]] = Counter()
    with httpx.Client(timeout=120, headers={"content-type": "application/json"}) as http:

        @settings(
            max_examples=count,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(cases())
        def send(case: tuple[str, str, dict[str, Any]]) -> None:
            method, path, body = case
            server = servers["embeds" if path in ("/encode", "/v1/embeddings") else "generates"]
            answer = http.request(
                method, server.url + path, content=encoded(body) if method == "POST" else None
            )
            answers[
                f"{method} {path.partition('?')[0] if method == 'POST' else '/v1/models/…'}",
                answer.status_code,
            ] += 1
            if path == SETTINGS and answer.status_code == 200:
                restore(http, server.url + SETTINGS, answer.json()[0]["changes"])
            where = (method, path, encoded(body)[:2000], answer.status_code, answer.text[-500:])
            assert answer.status_code in (200, 400, 404, 413), where
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n"), where
                assert '"code":5' not in answer.text, where

        send()
    for (route, status), number in sorted(answers.items()):
        print(f"{route} {status}: {number}")
    for server in servers.values():
        assert server.process.poll() is None
        assert not server.engine_is_gone()
        assert server.is_idle()
        assert "Traceback" not in server.errors
