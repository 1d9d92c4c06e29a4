"""Errors that come back from another machine: of the class they had, with all they said."""

import asyncio
import pickle

import pytest

from tokenmill.engine.ray_cluster.faults import Fault, fault_of, told
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
    back = sent.error
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_only_errors_of_ours_become_values() -> None:
    async def fails(error: Exception) -> int:
        raise error

    async def works() -> int:
        return 7

    assert asyncio.run(told(works())) == 7
    assert asyncio.run(told(fails(EngineError("no")))) == fault_of(EngineError("no"))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(told(fails(ZeroDivisionError())))
