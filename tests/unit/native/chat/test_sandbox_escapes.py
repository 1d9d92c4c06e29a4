"""A template cannot reach Python's objects or change its arguments."""

import pytest

from tokenmill.engine.engine import Chat
from tokenmill.errors import RequestRefused
from tokenmill.native.chat.template import ChatTemplate, SpecialTokens

NO_TOKENS = SpecialTokens("", "")
CHAT = Chat(({"role": "user", "content": "hi"},))


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "'' | attr('__class__')",
        "messages.__class__",
        "messages[0].__class__.__mro__",
        "(1).__class__",
        "namespace.__init__",
        "raise_exception.__globals__",
        "raise_exception.__code__",
        "namespace().__class__",
        "namespace()._Namespace__attrs",
        "namespace(**{'__class__': 'x'}).__class__",
        "self.__init__",
        "self._TemplateReference__context",
        "messages.append.__self__",
        "messages.sort",
        "messages.clear",
        "messages[0].update",
        "messages[0].pop",
        "messages | map(attribute='__class__') | first",
        "[''] | map(attribute='__class__.__base__') | first",
        "lipsum",
        "cycler",
        "joiner",
        "none.__class__",
        "missing.__class__",
        "strftime_now.__self__",
        "'{0.__class__}'.format(1)",
        "'{0.__class__.__mro__}'.format('')",
        "'{x.__init__}'.format_map({'x': 1})",
    ],
)
def test_nothing_is_reached(expression: str) -> None:
    source = "{{ messages[0].content }}{{ '|' ~ (" + expression + ") ~ '|' }}"
    assert ChatTemplate(source, NO_TOKENS).render(CHAT).text == "hi||"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop._iterable }}{{ loop._iterator }}{{ loop.__class__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m._func }}{{ m.__class__ }}{{ caller }}",
        "{% set ns = namespace(**{'__class__': 'x', '_Namespace__attrs': 'y'}) %}{{ ns.__class__ }}",
    ],
)
def test_objects_of_the_engine_are_closed(source: str) -> None:
    assert ChatTemplate(source + "{{ messages[0].content }}", NO_TOKENS).render(CHAT).text == "hi"


@pytest.mark.parametrize(
    "expression",
    ["''.__class__()", "messages.sort()", "messages[0].clear()", "range(100001)", "range(10 ** 12)", "loop.cycle()"],
)
def test_what_fails(expression: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        ChatTemplate("{{ " + expression + " }}", NO_TOKENS).render(CHAT)
    assert refused.value.code == "chat_template_failed"


def test_a_loop_does_not_see_what_its_body_appends() -> None:
    source = "{% set l = [1, 2] %}{% for x in l %}{% set _ = l.append(x) %}{% endfor %}{{ l }}{{ messages[0].content }}"
    assert ChatTemplate(source, NO_TOKENS).render(CHAT).text == "[1, 2, 1, 2]hi"
