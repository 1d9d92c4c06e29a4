"""Every error class has a code, an exit status and an HTTP status of its own, and can be sent between processes."""

import inspect
import json
import pickle
import re

import pytest

from tokenmill import errors
from tokenmill.errors import DoesNotFit, EngineDied, EngineError, TokenmillError, TooLong, from_wire, to_wire
from tokenmill.jobs.worker.retries import CutShort

ALL = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, TokenmillError)]
STATUS = re.compile(r"^    [│├└─ ]*([A-Z]\w+)  +.*?(?:exit (\d))?(?: +)?(?:http (\d+))?$")


def example(cls: type[TokenmillError]) -> TokenmillError:
    if cls is TooLong:
        return TooLong("9 tokens too many", needed_tokens=9, context_tokens=1, hint="raise --context")
    if cls is EngineDied:
        return EngineDied("killed", from_outside=True, hint="retry")
    return cls("it broke", hint="fix it")


def test_codes_are_unique_words() -> None:
    codes = [cls.code for cls in ALL]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn, path = {}, list[str]()
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)([A-Z]\w+)  ", line)
        if match:
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[-2] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in ALL}


def test_statuses_in_the_docstring_are_the_classes_own() -> None:
    drawn = {m[1]: m for line in (errors.__doc__ or "").splitlines() if (m := STATUS.match(line))}
    for cls in ALL:
        parent = next(base for base in (*cls.__mro__[1:], TokenmillError) if issubclass(base, TokenmillError))
        exit_code, http = drawn[cls.__name__][2], drawn[cls.__name__][3]
        assert cls.exit_code == (int(exit_code) if exit_code else parent.exit_code), cls
        assert cls.http_status == (int(http) if http else parent.http_status), cls


def test_only_a_plan_that_does_not_fit_exits_with_3() -> None:
    assert [cls for cls in ALL if cls.exit_code == 3] == [DoesNotFit]


def test_message_and_hint() -> None:
    error = TokenmillError("it broke", hint="mend it")
    assert (str(error), error.message, error.hint) == ("it broke", "it broke", "mend it")


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_the_wire(cls: type[TokenmillError]) -> None:
    sent = example(cls)
    came = from_wire(json.loads(json.dumps(to_wire(sent))))
    assert type(came) is cls
    assert (came.message, came.hint, came.code) == (sent.message, sent.hint, sent.code)
    assert [getattr(came, name) for name in cls.wire_fields] == [getattr(sent, name) for name in cls.wire_fields]


def test_a_code_of_its_own_survives_the_wire() -> None:
    assert from_wire(to_wire(EngineError("no weights", code="nan_logits"))).code == "nan_logits"


@pytest.mark.parametrize("kind", ["NotInvented", "ClassVar"])
def test_a_class_that_is_not_known_becomes_an_engine_error(kind: str) -> None:
    came = from_wire({"kind": kind, "message": "m", "hint": "h", "code": "new"})
    assert type(came) is EngineError
    assert (came.message, came.hint, came.code) == ("m", "h", "new")


@pytest.mark.parametrize("error", [*map(example, ALL), CutShort("cut", needed_tokens=9, context_tokens=1)], ids=repr)
def test_an_error_can_be_pickled_with_all_it_holds(error: TokenmillError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)
