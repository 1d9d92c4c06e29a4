"""Template expressions have the meaning of Jinja, and that of llama.cpp where Jinja fails."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.native.chat.sandbox import Sandbox

JINJA = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
JINJA.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
OURS = Sandbox()

EXPRESSIONS = [
    "t",
    "t | upper",
    "t | lower",
    "t | title",
    "t | capitalize",
    "t | trim",
    "t.strip()",
    "t.lstrip('a')",
    "t | replace('a', 'bb')",
    "t.replace('a', '', 1)",
    "t.split('a')",
    "t.split()",
    "t.rsplit('a', 1)",
    "t.splitlines()",
    "t[1:]",
    "t[::-1]",
    "t[-1]",
    "t | length",
    "t | list",
    "t | first",
    "t | last",
    "t | reverse",
    "t.startswith('a')",
    "t.endswith(('a', 'b'))",
    "t.find('a')",
    "t.count('a')",
    "t.removeprefix('a')",
    "t.partition('a')",
    "t | indent",
    "t | indent(2, true, true)",
    "t | int",
    "t | float",
    "t | tojson",
    "t ~ n ~ l",
    "t * 3",
    "t + 'x'",
    "t in 'abc'",
    "'a' in t",
    "t == 'a'",
    "t < 'b'",
    "t is string",
    "t is upper",
    "t is lower",
    "t.isdigit()",
    "'{} {}'.format(t, n)",
    "'{0}{1}{0}{{}}'.format(t, n)",
    "'{x}'.format(x=t)",
    "t if n else l",
    "t or 'x'",
    "t and 'x'",
    "not t",
    "n + 1",
    "n - 2.5",
    "n * n",
    "n / 3",
    "n // 2",
    "n % 3",
    "-n",
    "n | abs",
    "n is odd",
    "n is even",
    "n is divisibleby 3",
    "n is number",
    "n is integer",
    "n is float",
    "n > 1 and n <= 5",
    "1 < n < 3",
    "n == 2.0",
    "n | string",
    "n is gt 2",
    "l",
    "l | length",
    "l | first",
    "l | last",
    "l | list",
    "l | join(', ')",
    "l | unique | list",
    "l | sort",
    "l | sort(reverse=true)",
    "l | reverse | list",
    "l | min",
    "l | max",
    "l | sum",
    "l[1:]",
    "l[0]",
    "l[99] is defined",
    "l + [1]",
    "2 in l",
    "2 not in l",
    "l == [1, 2]",
    "l | map('string') | list",
    "l | select('odd') | list",
    "l | reject('equalto', 2) | list",
    "l | tojson",
    "l is iterable",
    "l is sequence",
    "l is mapping",
    "(1, 'x')",
    "d",
    "d.a",
    "d['a']",
    "d.b.c",
    "d.get('a')",
    "d.get('z', 1)",
    "d | length",
    "d.keys() | list",
    "d.values() | list",
    "d.items() | list",
    "d | items | list",
    "d | dictsort",
    "d | dictsort(reverse=true)",
    "d | tojson",
    "d | tojson(indent=2)",
    "d | tojson(separators=(',', ':'))",
    "d | tojson(sort_keys=true)",
    "'a' in d",
    "d is mapping",
    "d | list",
    "d == {'a': 1}",
    "[d, d] | map(attribute='a') | list",
    "{'x': d, 'y': [n]}.y",
    "[d] | selectattr('a') | list",
    "[d] | rejectattr('a', 'equalto', 1) | list",
    "[d] | map(attribute='z', default=3) | list",
    "[d] | join(',', attribute='a')",
    "missing is defined",
    "missing",
    "missing | default('x')",
    "'' | default('x', true)",
    "none | default('x')",
    "missing | length",
    "missing | upper",
    "true",
    "none is none",
    "namespace(a=n).a",
    "dict(a=n, b=t)",
    "range(3) | list",
    "range(n, 5) | list",
    "[n, t] | string",
    "none | string",
    "none == false",
    "true is boolean",
    "n is sameas n",
    "t | trim('a')",
    "d is callable",
    "range is callable",
    "d.a | string",
]

TEXT = st.text(st.sampled_from("abA \nß'\"9-é你"), max_size=12)
NUMBERS = st.integers(-9, 9)


_COMPILED = {
    expression: (JINJA.from_string(source), OURS.compiled(source))
    for expression in EXPRESSIONS
    for source in ["{% set x = " + expression + " %}{{ x if x is not none }}"]
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(max_examples=20, deadline=None)
@given(t=TEXT, n=NUMBERS, numbers=st.lists(NUMBERS, max_size=5), key=TEXT)
@example(t="", n=0, numbers=[], key="")
@example(t=" aBa\n\nb ", n=2, numbers=[1, 2], key="B")
def test_it_means_what_jinja_means(expression: str, t: str, n: int, numbers: list[int], key: str) -> None:
    values = {"t": t, "n": n, "l": numbers, "d": {"a": n, "b": {"c": t}, key: t}}
    theirs, ours = _COMPILED[expression]
    try:
        expected = str(theirs.render(values))
    except Exception:  # noqa: BLE001
        return
    assert OURS.render(ours, values) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in [3, 1] %}{{ loop.index }}{{ x }}{{ ',' if not loop.last }}{% endfor %}", "13,21"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}", "a=1"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, 2, 3, 4] if x is even %}{{ x }}{{ loop.length }}{% endfor %}", "2242"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in 'ab' %}{{ x }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}", "ab;ba;"),
        ("{% for x in [1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop.revindex0 }}{% endfor %}", "a1b0"),
        ("{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(2, b=3) }}", "1x23"),
        ("{% macro m() %}[{{ caller('y') }}]{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}", "[y]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{% if missing %}a{% elif 1 in [1] %}b{% else %}c{% endif %}", "b"),
        ("{% set a, b = (1, 2) %}{{ a }}{{ b }}", "12"),
        ("{# a comment -#}   x{{- ' y ' -}}  z", "x y z"),
        ("{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
    ],
)
def test_statements(source: str, expected: str) -> None:
    assert OURS.render(OURS.compiled(source), {}) == JINJA.from_string(source).render() == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'a' + missing", "a"),
        ("none + 'a'", "a"),
        ("'a' + 1", "a1"),
        ("'a' ~ none ~ 'b'", "ab"),
        ("none", ""),
        ("missing.a.b['c']", ""),
        ("missing[0]", ""),
        ("missing[1:]", ""),
        ("missing | tojson", "null"),
        ("{'a': missing} | tojson", '{"a": null}'),
        ("none | items | list", "[]"),
        ("missing.items()", "[]"),
        ("none.items()", "[]"),
        ("missing.strip()", ""),
        ("'a' in missing", "False"),
        ("missing == missing2", "True"),
        ("[1, 2] | selectattr('x') | length", "0"),
        ("'a' | tojson(ensure_ascii=true)", '"a"'),
        ("'é<' | tojson(ensure_ascii=true)", '"\\u00e9<"'),
        ("'é<&' | tojson", '"é<&"'),
        ("messages.0.x", "1"),
    ],
)
def test_where_jinja_gives_up(expression: str, expected: str) -> None:
    written = OURS.render(OURS.compiled("{{ " + expression + " }}"), {"messages": [{"x": 1}]})
    assert written == expected
