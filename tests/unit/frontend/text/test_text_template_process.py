"""A template that computes for ever, or wants all the memory, costs its own request an error and
nobody else anything."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psutil
import pytest

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.frontend.text.processor import Template
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.template_process import TemplateProcess
from setpoint_testing.chat_templates import CHATS, TEMPLATES

HI = [{"role": "user", "content": "hi"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@contextmanager
def process_of(source: str) -> Iterator[TemplateProcess]:
    with closing(TemplateProcess(source, special_tokens=TOKENS)) as template:
        yield template
    assert template.pid is None


def outcome(template: Template, messages: Any, generate: bool, variables: Any) -> str:
    """The prompt, or the complaint."""
    try:
        return template.render(messages, add_generation_prompt=generate, variables=variables)
    except RequestError as error:
        return error.message


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_what_the_template_renders(name: str) -> None:
    plain = ChatTemplate(TEMPLATES[name], special_tokens=TOKENS)
    with process_of(TEMPLATES[name]) as template:
        for messages, variables in CHATS:
            for generate in (True, False):
                assert outcome(template, messages, generate, variables) == outcome(
                    plain, messages, generate, variables
                )


OF_MEMORY = r"needs more than 512 MiB|computes for more than 2 s"
"""A busy machine can need two seconds to fill the memory."""

HOSTILE = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "computes for more than 2 s",
    ),
    "lipsum": ("{{ lipsum(n=10000000) }}", "computes for more than 2 s"),
    "a power": (
        "{{ messages | length + 10 ** (10 ** (9 + messages | length)) }}",
        "computes for more than 2 s",
    ),
    "a format's width": ("{{ '%0999999999d' % (messages | length) }}", OF_MEMORY),
    "a product": ("{{ 'x' * 999999999 * (messages | length) }}", OF_MEMORY),
    "doubling": (
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{%"
            " endfor %}{{ ns.x }}"
        ),
        OF_MEMORY,
    ),
    "replacing": (
        "{{ ('a' * 9999 * (messages | length)).replace('a', 'b' * 99999) }}",
        OF_MEMORY,
    ),
    "a long prompt": (
        "{{ 'x' * 20000000 * (messages | length) }}",
        "a prompt of more than 16777216 bytes",
    ),
    "a long complaint": ("{{ raise_exception('no! ' * 1000000) }}", "no! no! "),
    "recursion": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
}


SLOW = ("lipsum", "a power")
"""Two seconds each, to show what the nested loops show."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in HOSTILE],
)
def test_a_limit_ends_one_request(name: str) -> None:
    """Red before: most of these never ended, or took the memory of the machine."""
    hostile, message = HOSTILE[name]
    source = (
        "{% if messages[0].content == 'boo' %}"
        + hostile
        + "{% else %}{{ messages[0].content }}{% endif %}"
    )
    with process_of(source) as template:
        assert template.render(HI) == "hi"
        started = time.perf_counter()
        with pytest.raises(RequestError, match=message) as caught:
            template.render([{"role": "user", "content": "boo"}])
        print(f"{name}: {time.perf_counter() - started:.2f} s")
        assert caught.value.status_code == 400
        assert len(caught.value.message) < 1100
        assert template.render(HI) == "hi"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "Expected an expression"),
        pytest.param(
            "{{ 10 ** (10 ** 10) }}", "computes for more than 2 s", marks=pytest.mark.full
        ),
    ],
)
def test_a_template_that_cannot_be_compiled(source: str, message: str) -> None:
    """Constants are computed by the compiler."""
    with pytest.raises(CheckpointError, match=f"cannot be compiled .*{message}"):
        TemplateProcess(source)


def test_values_that_json_cannot_hold_are_refused() -> None:
    with process_of("{{ messages[0].content }}{{ number }}") as template:
        for value in (object(), {1, 2}.__iter__(), "\ud800"):
            with pytest.raises(RequestError, match="cannot be encoded as JSON"):
                template.render(HI, variables={"number": value})
        assert template.render(HI, variables={"number": 1.5}) == "hi1.5"
        assert template.render([{"role": "user", "content": "漢字\n🚀\x00"}]) == "漢字\n🚀\x00"


def test_a_process_that_the_system_kills_is_replaced_without_the_request_noticing() -> None:
    """Red before: the request got a 400, as if its messages were to blame."""
    with process_of("{{ messages[0].content }}") as template:
        assert template.pid is not None
        os.kill(template.pid, signal.SIGKILL)
        assert template.render(HI) == "hi"


def test_a_process_that_is_stopped_is_replaced_without_the_request_noticing() -> None:
    """Red before: chats waited for a minute, and got a 503."""
    with process_of("{{ messages[0].content }}") as template:
        assert template.pid is not None
        stopped = template.pid
        os.kill(stopped, signal.SIGSTOP)
        long = [{"role": "user", "content": "hi" * (1 << 20)}]
        assert template.render(long) == long[0]["content"], "longer than what a socket holds"
        assert template.pid != stopped
        assert not psutil.pid_exists(stopped)


def test_a_request_whose_processes_are_stopped_again_and_again_is_to_be_repeated() -> None:
    with process_of("{{ messages[0].content }}") as template:
        over = threading.Event()

        def stop() -> None:
            while not over.wait(0.001):
                if (pid := template.pid) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            with pytest.raises(RequestError, match="process was stopped by a signal") as caught:
                deque((template.render(HI) for _ in range(100_000)), maxlen=0)
        finally:
            over.set()
            stopper.join()
        assert caught.value.status_code == 503
        assert template.render(HI) == "hi"


@pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGBUS, signal.SIGPROF])
def test_no_request_is_blamed_for_a_process_that_ended_before_it(by: signal.Signals) -> None:
    """Red before: the next request got a 400, as if its messages had crashed the process."""
    with process_of("{{ messages[0].content }}") as template:
        assert template.pid is not None
        child = psutil.Process(template.pid)
        child.send_signal(by)
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert template.render(HI) == "hi"


def test_a_request_whose_processes_are_killed_again_and_again_is_to_be_repeated() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with process_of("{% if messages | length > 1 %}" + source + "{% endif %}") as template:
        stopped = threading.Event()

        def kill() -> None:
            while not stopped.wait(0.01):
                if (pid := template.pid) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(RequestError, match="process was ended by SIGKILL") as caught:
                template.render(HI * 2)
        finally:
            stopped.set()
            killer.join()
        assert caught.value.status_code == 503
        assert template.render(HI) == ""


def test_an_interrupted_request_leaves_no_answer_for_the_next_one() -> None:
    """Red before: the process went on, and its answer became that of the next request. One that was
    interrupted while its template was compiled was never ended."""
    source = (
        "{% if messages[0].content == 'long' %}{% for i in range(999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    with closing(TemplateProcess(source)) as process:
        first = process.pid
        assert first is not None
        threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            process.render([{"role": "user", "content": "long"}])
        assert process.render([{"role": "user", "content": "short"}]) == "short"
        assert not psutil.pid_exists(first)


def test_closing_ends_it_even_while_it_renders() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = TemplateProcess(source)
    assert template.pid is not None
    child = psutil.Process(template.pid)

    def render() -> None:
        with pytest.raises(RequestError):
            template.render(HI)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.1)
    template.close()
    thread.join()
    assert not child.is_running()
