"""A hostile template is stopped, and the next request succeeds."""

import os
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tokenmill.engine.engine import Chat
from tokenmill.errors import EngineError, ModelError, RequestRefused
from tokenmill.native.chat.renderer import Renderer
from tokenmill.native.chat.template import CHATML, ChatTemplate, SpecialTokens, TemplateSource
from tokenmill.native.limited_process import ProcessLimits
from tokenmill.units import MIB

DATA = Path(__file__).parents[3] / "data" / "templates"
NO_TOKENS = SpecialTokens("", "")
LIMITS = ProcessLimits(memory_bytes=64 * MIB, cpu_s=1, wall_s=60.0)
NOON = datetime(2026, 3, 4, 12)
TWICE = "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "one call into C": TWICE + "{{ ns.a == ns.b }}",
    "large numbers": "{{ 10 ** (10 ** 10 * (messages | length)) }}",
    "text doubled": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "text repeated": "{{ 'a' * 9999999999 }}",
    "text padded": "{{ '%9999999999d' % 1 }}",
    "text formatted": "{{ '{:>9999999999}'.format(1) }}",
    "text centred": "{{ 'a' | center(9999999999) }}",
    "text indented": "{{ ('a\n' * 9999) | indent(999999) }}",
    "list repeated": "{{ [1] * 9999999999 }}",
    "list doubled": "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "shared parts written": TWICE + "{{ ns.a }}",
    "shared parts as JSON": TWICE + "{{ ns.a | tojson }}",
    "output": "{% set s = 'a' * 9999 %}{% for a in range(99999) %}{{ s }}{% endfor %}",
}


def chat(content: str) -> Chat:
    return Chat(({"role": "user", "content": content},))


def pid_of(renderer: Renderer) -> int:
    assert renderer.pid is not None
    return renderer.pid


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer(LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_exceeds_a_limit_is_stopped_and_the_next_request_answered(
    renderer: Renderer, name: str
) -> None:
    source = "{% if messages[0].content == 'attack' %}" + HOSTILE[name] + "{% endif %}{{ messages[0].content }}"
    renderer.open(TemplateSource(source), NO_TOKENS)
    with pytest.raises(RequestRefused) as refused:
        renderer.render(chat("attack"))
    assert refused.value.code == "chat_template_stopped"
    assert renderer.render(chat("hi")).text == "hi"


@pytest.mark.parametrize("name", ["loops", "one call into C", "text repeated"])
def test_a_model_whose_template_exceeds_a_limit_is_not_loaded(renderer: Renderer, name: str) -> None:
    with pytest.raises(ModelError):
        renderer.open(TemplateSource(HOSTILE[name]), NO_TOKENS)


def test_a_child_that_does_not_answer_is_killed() -> None:
    renderer = Renderer(ProcessLimits(64 * MIB, cpu_s=1, wall_s=5.0))
    renderer.open(TemplateSource("{{ messages[0].content }}"), NO_TOKENS)
    os.kill(pid_of(renderer), signal.SIGSTOP)
    with pytest.raises(RequestRefused) as refused:
        renderer.render(chat("hi"))
    assert refused.value.code == "chat_template_stopped"
    assert renderer.render(chat("hi")).text == "hi"
    renderer.close()


def test_a_child_that_was_killed_is_replaced(renderer: Renderer) -> None:
    renderer.open(TemplateSource("{{ messages[0].content }}"), NO_TOKENS)
    os.kill(pid_of(renderer), signal.SIGKILL)
    with pytest.raises(EngineError):
        renderer.render(chat("hi"))
    assert renderer.render(chat("hi")).text == "hi"


def test_it_renders_what_the_template_renders(renderer: Renderer) -> None:
    source = TemplateSource((DATA / "qwen3.jinja").read_text())
    renderer.open(source, SpecialTokens("<s>", "</s>"))
    template = ChatTemplate(source, SpecialTokens("<s>", "</s>"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = Chat(chat("Zürich? 你好").messages, (tool,), "auto", {"enable_thinking": False})
    assert renderer.render(asked, now=NOON) == template.render(asked, now=NOON)
    assert (renderer.shows_tools, renderer.notes) == (template.shows_tools, template.notes)


def test_errors_arrive_as_they_were_raised(renderer: Renderer) -> None:
    renderer.open(TemplateSource("{{ raise_exception('no') }}"), NO_TOKENS)
    with pytest.raises(RequestRefused, match="no") as refused:
        renderer.render(chat("hi"))
    assert refused.value.code == "chat_template_refused"
    with pytest.raises(RequestRefused):
        renderer.render(Chat(({"role": "user", "content": 7},)))


def test_half_a_surrogate_pair_is_refused(renderer: Renderer) -> None:
    renderer.open(TemplateSource("{{ messages[0].content }}"), NO_TOKENS)
    with pytest.raises(RequestRefused, match=r"messages\[0\]"):
        renderer.render(chat("\ud83d"))


def test_a_syntax_error_is_a_model_error(renderer: Renderer) -> None:
    with pytest.raises(ModelError, match="line 1"):
        renderer.open(TemplateSource("{% for %}"), NO_TOKENS)


def test_a_prompt_may_be_long(renderer: Renderer) -> None:
    renderer.open(TemplateSource(CHATML), NO_TOKENS)
    text = "é" * (1 << 20)
    assert text in renderer.render(chat(text)).text


def test_several_threads_may_render(renderer: Renderer) -> None:
    renderer.open(TemplateSource("{{ messages[0].content }}"), NO_TOKENS)
    wrong: list[str] = []

    def work(text: str) -> None:
        wrong.extend(text for _ in range(50) if renderer.render(chat(text)).text != text)

    threads = [threading.Thread(target=work, args=(f"question {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
