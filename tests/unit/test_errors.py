"""Every error has an exit code, an HTTP answer and words for the operator, and the drawn tree is true."""

import inspect
import re

from tokenmill import errors
from tokenmill.errors import TokenmillError

ALL = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, TokenmillError)]


def test_edges_are_covered() -> None:
    for cls in ALL:
        assert cls.exit_code in (1, 2, 3), cls
        assert 400 <= cls.http_status < 600, cls
        assert cls.__doc__, cls


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn, path = {}, list[str]()
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)([A-Z]\w+)  ", line)
        if match:
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[-2] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in ALL}


def test_message_and_hint() -> None:
    error = TokenmillError("it broke", hint="mend it")
    assert (str(error), error.message, error.hint) == ("it broke", "it broke", "mend it")
