"""Errors of another machine as values.

Exceptions do not pickle well: those with arguments of their own do not survive the round trip. So a remote call returns
a `Fault`, and the caller raises `Fault.error`.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenmill.errors import TokenmillError, from_wire, to_wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """One error, as `errors.to_wire` encodes it."""

    wire: Mapping[str, Any]
    over: bool = False  # the engine will not come back

    @property
    def error(self) -> TokenmillError:
        """The error, with the class it had on the other machine."""
        return from_wire(self.wire)


def fault_of(error: TokenmillError, *, over: bool = False) -> Fault:
    """The value that carries an error."""
    return Fault(to_wire(error), over)


async def told(work: Awaitable[T]) -> T | Fault:
    """The result of some work, or its error as a value."""
    try:
        return await work
    except TokenmillError as error:
        return fault_of(error)
