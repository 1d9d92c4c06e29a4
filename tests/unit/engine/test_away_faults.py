"""Errors that come back from another machine: of the class they had, with all they said."""

import asyncio
import pickle

import pytest

from tokenmill.engine.away.faults import Fault, error_of, fault_of, told
from tokenmill.errors import (
    EngineDied,
    EngineError,
    EngineTimeout,
    RequestRefused,
    TokenmillError,
    TooLong,
    UnknownModel,
)

ERRORS = [
    EngineError("it failed", hint="try again"),
    EngineTimeout("too late"),
    EngineDied("killed", from_outside=True),
    EngineDied("crashed", hint="its log"),
    RequestRefused("no such thing"),
    TooLong("5 too many", needed_tokens=105, context_tokens=100, hint="shorten it"),
    UnknownModel("kimi is not here", hint="pull it"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_it_was(error: TokenmillError) -> None:
    sent: Fault = pickle.loads(pickle.dumps(fault_of(error)))
    back = error_of(sent)
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_a_class_that_only_the_other_side_knows_is_an_engines_error() -> None:
    back = error_of(Fault("FromTheFuture", "it is new", "update"))
    assert type(back) is EngineError
    assert (back.message, back.hint) == ("it is new", "update")


def test_a_name_that_is_no_error_is_an_engines_error() -> None:
    assert type(error_of(Fault("ClassVar", "odd"))) is EngineError


def test_only_errors_of_ours_become_values() -> None:
    async def fails(error: Exception) -> int:
        raise error

    async def works() -> int:
        return 7

    assert asyncio.run(told(works())) == 7
    assert asyncio.run(told(fails(EngineError("no")))) == Fault("EngineError", "no")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(told(fails(ZeroDivisionError())))
