"""Errors as values: what goes wrong on another machine is sent back as one of these, and raised here.

Exceptions themselves do not travel well: those with arguments of their own do not come out of a pickle as they went in.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenmill import errors
from tokenmill.errors import EngineDied, EngineError, TokenmillError, TooLong

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """One error."""

    kind: str  # the name of its class
    message: str
    hint: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the class
    over: bool = False  # the engine will not come back


def fault_of(error: TokenmillError, *, over: bool = False) -> Fault:
    """An error as it travels."""
    more: dict[str, Any] = {}
    if isinstance(error, TooLong):
        more = {"needed_tokens": error.needed_tokens, "context_tokens": error.context_tokens}
    elif isinstance(error, EngineDied):
        more = {"from_outside": error.from_outside}
    return Fault(type(error).__name__, error.message, error.hint, more, over)


def error_of(fault: Fault) -> TokenmillError:
    """The error that came, of the class it had; an EngineError where that class is not known here."""
    kind = getattr(errors, fault.kind, None)
    if isinstance(kind, type) and issubclass(kind, TokenmillError):
        return kind(fault.message, hint=fault.hint, **fault.more)
    return EngineError(fault.message, hint=fault.hint)


async def told(work: Awaitable[T]) -> T | Fault:
    """What comes of some work, its error as a value."""
    try:
        return await work
    except TokenmillError as error:
        return fault_of(error)
