"""A hostile template gets at nothing, and ends."""

import time
from dataclasses import replace

import pytest

from tokenmill.engine.engine import Chat
from tokenmill.errors import RequestRefused
from tokenmill.native.chat import Template
from tokenmill.native.chat_budget import Limits

CHAT = Chat(({"role": "user", "content": "hi"},))
FEW = Limits(steps=300_000, steps_a_message=0, characters=1 << 20, output=1 << 16)
TWICE = "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "messages.__class__",
        "messages[0].__class__.__mro__",
        "(1).__class__",
        "namespace.__init__",
        "namespace.run",
        "raise_exception.run.__globals__",
        "range.name",
        "namespace().__class__",
        "namespace()._Namespace__attrs",
        "self.__init__",
        "self._TemplateReference__context",
        "messages.append.run",
        "messages.sort",
        "messages.clear",
        "messages[0].update",
        "messages[0].pop",
        "''.encode",
        "''.translate",
        "''.format_map",
        "''.zfill",
        "''.center",
        "''.ljust",
        "messages | map(attribute='__class__') | first",
        "[''] | map(attribute='__class__.__base__') | first",
        "lipsum",
        "cycler",
        "joiner",
        "none.__class__",
        "missing.__class__",
        "strftime_now.__globals__",
        "strftime_now.run",
        "messages[0].items.run",
    ],
)
def test_nothing_is_reached(expression: str) -> None:
    source = "{{ messages[0].content }}{{ '|' ~ (" + expression + ") ~ '|' }}"
    assert Template(source, bos="", eos="").render(CHAT) == "hi||"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop._iterable }}{{ loop._iterator }}{{ loop.__class__ }}{{ loop.changed }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m._func }}{{ m.__class__ }}{{ m.name }}{{ caller }}",
        "{% set ns = namespace(**{'__class__': 'x', '_Namespace__attrs': 'y'}) %}{{ ns.__class__ }}{{ ns['__class__'] }}",
    ],
)
def test_objects_of_the_engine_are_closed(source: str) -> None:
    assert Template(source + "{{ messages[0].content }}", bos="", eos="").render(CHAT) == "hi"


@pytest.mark.parametrize(
    "expression",
    [
        "'{0.__class__}'.format(1)",
        "'{0[0]}'.format([1])",
        "'{:>99}'.format(1)",
        "'{!r}'.format(1)",
        "'{'.format(1)",
        "'%99d' % 1",
        "2 ** 99",
        "[1] * 9",
        "'x'.join(1)",
        "namespace",
        "raise_exception",
        "messages.append",
        "{(1, n): 3}",
        "{[1]: 3}",
        "messages[0][[1]]",
        "dict([[[1], 2]])",
        "range(100001)",
        "[[1], [2]] | sort",
        "[messages] | unique",
        "[[1]] | max",
        "['a'] | sum",
        "99999999999999 * 99999999999999",
        "loop.cycle()",
    ],
)
def test_what_is_refused(expression: str) -> None:
    template = Template("{{ " + expression + " }}", bos="", eos="")
    with pytest.raises(RequestRefused, match="failed on this conversation"):
        template.render(CHAT)


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "wide loop": "{% for a in range(99999) %}" + "{% if a == 1 %}{% endif %}" * 500 + "{% endfor %}",
    "loop condition": "{% for a in range(99999) if range(99999) | list | length == 3 %}{% endfor %}",
    "text added": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "text joined": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "text of a block": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "text of a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = m(ns.s) %}{% endfor %}",
    "text of a filter block": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set t %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = t %}{% endfor %}",
    "text replaced": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s | replace('a', 'aaaa') %}{% endfor %}",
    "text between": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s] | join(ns.s) %}{% endfor %}",
    "text filled in": "{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = '{}{}'.format(ns.s, ns.s) %}{% endfor %}",
    "text repeated": "{{ 'a' * 9999999999 }}",
    "text indented": "{% set s = '\n' * 99999 %}{{ s | indent(60) }}",
    "text split": "{{ ('a ' * 99999).split(' ') | length }}",
    "text split at spaces": "{% for a in range(99) %}{% set x = ('a ' * 9999).split() %}{% endfor %}",
    "letters": "{% for a in range(99) %}{% set x = ('a' * 9999) | list %}{% endfor %}",
    "letters stripped": "{{ ('a' * 99999).strip('bcdefghijklmn' * 9999) }}",
    "text searched": "{% set s = 'a' * 99999 %}{% for a in range(99999) %}{% if 'aab' in s %}{% endif %}{% endfor %}",
    "text compared": "{% set s = 'a' * 99999 %}{% set t = 'a' * 99998 ~ 'a' %}{% for a in range(99999) %}{% if s == t %}{% endif %}{% endfor %}",
    "text cut": "{% set s = 'a' * 9999 %}{% for a in range(99999) %}{% set x = s[::-1] %}{% endfor %}",
    "list doubled": "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "list grown": "{% set l = [] %}{% for a in range(99999) %}{% set _ = l.append(a) %}{% endfor %}",
    "list turned": "{% set l = range(999) | list %}{% for a in range(99999) %}{% set _ = l.append(l.pop(0)) %}{% endfor %}",
    "list mapped": "{% for a in range(99) %}{% set x = range(999) | map('string') | list %}{% endfor %}",
    "list chosen": "{% for a in range(99) %}{% set x = range(999) | select('odd') | list %}{% endfor %}",
    "ranges": "{% for a in range(99) %}{% set x = range(99999) | list %}{% endfor %}",
    "mappings": "{% for a in range(99999) %}{% set x = {'a': {'b': {}}} %}{% endfor %}",
    "shared parts compared": TWICE + "{{ ns.a == ns.b }}",
    "shared parts found": TWICE + "{{ ns.a in [ns.b] }}",
    "shared parts written": TWICE + "{{ ns.a }}",
    "shared parts as text": TWICE + "{{ ns.a | string }}",
    "shared parts as JSON": TWICE + "{{ ns.a | tojson }}",
    "macros in pairs": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "calls": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for a in range(9999) %}{% call m() %}x{% endcall %}{% endfor %}",
    "output": "{% set s = 'a' * 9999 %}{% for a in range(9999) %}{{ s }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_stopped(name: str) -> None:
    template = Template(HOSTILE[name], bos="", eos="", limits=FEW)
    with pytest.raises(RequestRefused, match="was stopped: it (took|made|wrote)") as refused:
        template.render(CHAT)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}", "nested too deep"),
        ("{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}", "nested too deep"),
        (
            "{% set l = [] %}{% set _ = l.append(l) %}{% set m = [] %}{% set _ = m.append(m) %}{{ l == m }}",
            "nested too deep",
        ),
    ],
)
def test_endless_values_fail(source: str, said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        Template(source, bos="", eos="").render(CHAT)


def test_a_loop_does_not_see_what_its_body_appends() -> None:
    source = "{% set l = [1, 2] %}{% for x in l %}{% set _ = l.append(x) %}{% endfor %}{{ l }}{{ messages[0].content }}"
    assert Template(source, bos="", eos="").render(CHAT) == "[1, 2, 1, 2]hi"


def test_the_whole_budget_is_seconds() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = messages[0].content %}{% endfor %}{% endfor %}"
    template = Template(source, bos="", eos="")
    before = time.process_time()
    with pytest.raises(RequestRefused, match="too many steps"):
        template.render(CHAT)
    assert time.process_time() - before < 30  # 2 s on the machine it was measured on


def test_slow_steps_are_stopped_by_the_clock() -> None:
    template = Template(HOSTILE["loops"], bos="", eos="", limits=Limits(steps=20_000_000, cpu_s=0.0))
    with pytest.raises(RequestRefused, match="it took too long"):
        template.render(CHAT)


def test_long_conversations_may_take_more() -> None:
    source = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": ""}] * 200
    generous = replace(FEW, steps_a_message=20_000)
    assert Template(source, bos="", eos="", limits=generous).render(Chat(tuple(messages))) == ""
    with pytest.raises(RequestRefused, match="too many steps"):
        Template(source, bos="", eos="", limits=FEW).render(Chat(tuple(messages)))
