"""What operators do with a chat template's values, each paid for from the rendering's budget.

Values are texts, numbers, truth values, none, missing ones, lists, tuples and mappings. Comparing, writing out or
looking a value up by key never recurses inside Python's own code: a list of lists of the same list is small, and
walking through it could take for ever.

Where Jinja would give up on a missing value this goes on as llama.cpp's engine does: missing or none adds nothing to
a text.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from jinja2 import Undefined

from tokenmill.native.chat_budget import Budget, Limits

_DEEPEST = 100
OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}


class Witness(Protocol):
    """Hears what a template does with the values it is given; may raise to end the rendering."""

    def note(self, operation: str, value: object) -> None:
        """`operation` is get, item, loop, write, deep, "filter NAME" or "test NAME"."""


class Values:
    """The operators of one template; `budget` and `witness` are those of the rendering under way."""

    __slots__ = ("budget", "witness")

    def __init__(self, limits: Limits) -> None:
        self.budget = Budget(limits)
        self.witness: Witness | None = None

    def note(self, operation: str, *values: object) -> None:
        """Tell the witness, where there is one."""
        if self.witness:
            for value in values:
                self.witness.note(operation, value)

    def joined(self, *values: Any) -> str:
        """`a ~ b`."""
        found = [self.written(value) for value in values]
        self.budget.make(sum(map(len, found)))
        return "".join(found)

    def mapped(self, *parts: Any) -> dict[Any, Any]:
        """`{a: b}`."""
        self.budget.collect(len(parts))
        return {self.key(name): value for name, value in zip(parts[::2], parts[1::2], strict=True)}

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`a[b:c:d]`."""
        if isinstance(value, Undefined):
            return value
        if not isinstance(value, list | tuple | str | range):
            raise TypeError(f"{kind(value)} has no parts")
        if isinstance(value, str):
            self.budget.make(len(value))
        else:
            self.budget.copy(len(value))
        return value[slice(start, stop, step)]

    def compared(self, left: Any, *rest: Any) -> bool:
        """`a < b <= c`, and so on."""
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            if not self._holds(name, left, right):
                return False
            left = right
        return True

    def _holds(self, name: str, left: Any, right: Any) -> bool:
        self.note("write", left, right)
        if name in {"eq", "ne"}:
            return self.equal(left, right) == (name == "eq")
        if name in {"in", "notin"}:
            return self.contains(right, left) == (name == "in")
        if isinstance(left, str) and isinstance(right, str):
            self.budget.read(min(len(left), len(right)))
        elif not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TypeError(f"{kind(left)} and {kind(right)} have no order")
        return _COMPARE[name](left, right)

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two values are the same; parts of lists and mappings are paid for one by one."""
        waiting = [(left, right, 0)]
        while waiting:
            one, other, depth = waiting.pop()
            self._visit(depth)
            if isinstance(one, list | tuple) and type(one) is type(other):
                if len(one) != len(other):
                    return False
                self.budget.collect(len(one))
                waiting.extend((a, b, depth + 1) for a, b in zip(one, other, strict=True))
            elif isinstance(one, dict) and isinstance(other, dict):
                self.budget.collect(len(one))
                if one.keys() != other.keys():
                    return False
                waiting.extend((value, other[name], depth + 1) for name, value in one.items())
            else:
                if isinstance(one, str) and isinstance(other, str):
                    self.budget.read(min(len(one), len(other)))
                if one != other:
                    return False
        return True

    def contains(self, container: Any, value: Any) -> bool:
        """`value in container`."""
        if isinstance(container, str):
            if not isinstance(value, str):
                raise TypeError(f"{kind(value)} cannot be part of a text")
            self.budget.read(len(container))
            return value in container
        if isinstance(container, dict):
            return self.key(value) in container
        if isinstance(container, list | tuple | range):
            return any(self.equal(value, item) for item in container)
        if isinstance(container, Undefined):
            return False
        raise TypeError(f"{kind(container)} holds nothing")

    def key(self, value: Any) -> Any:
        """A value as the key of a mapping."""
        if value is None or isinstance(value, str | int | float):
            return value
        raise TypeError(f"{kind(value)} cannot be a key")

    def written(self, value: Any) -> str:
        """A value as text; what is missing or none writes nothing."""
        self.note("write", value)
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, Undefined):
            return ""
        return self.text(value)

    def text(self, value: Any) -> str:
        """A value as Python writes it."""
        if isinstance(value, str):
            return value
        self.budget.make(self.measured(value))
        return str(value)

    def measured(self, value: Any, letter: int = 2, indent: int = 0) -> int:
        """About how long a value is as text, rather more than less; `letter`: characters that one may become."""
        length = 0
        waiting = [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            self._visit(depth)
            length += 4 + indent * depth
            if isinstance(part, str):
                length += letter * len(part)
            elif isinstance(part, list | tuple | range):
                self.budget.collect(len(part))
                waiting.extend((inner, depth + 1) for inner in part)
            elif isinstance(part, dict):
                self.budget.collect(2 * len(part))
                waiting.extend((inner, depth + 1) for pair in part.items() for inner in pair)
            elif part is None or isinstance(part, int | float | Undefined):
                length += 24
            else:
                raise TypeError(f"{kind(part)} cannot be written")
        return length

    def _visit(self, depth: int) -> None:
        """Pay for one value on a walk through others."""
        self.budget.spend(20)
        if depth > _DEEPEST:
            raise ValueError("a value is nested too deep")

    def reckoned(self, name: str, left: Any, right: Any) -> Any:
        """Arithmetic on numbers; `+` on texts and lists, `*` on a text and a number."""
        self.note("write", left, right)
        self.budget.spend(1)
        if isinstance(left, int | float) and isinstance(right, int | float) and name != "**":
            result = OPERATORS[name](left, right)
            if isinstance(result, int) and abs(result) >> 63:
                raise OverflowError("a number is too large")
            return result
        if name == "+" and (isinstance(left, str) or isinstance(right, str)):
            return self.joined(left, right)
        if name == "+" and isinstance(left, list | tuple) and type(left) is type(right):
            self.budget.copy(len(left) + len(right))
            return OPERATORS["+"](left, right)
        if name == "*" and isinstance(left, str) and isinstance(right, int):
            self.budget.make(len(left) * max(right, 0))
            return left * right
        raise TypeError(f"{named(left)} {name} {named(right)} means nothing")


def kind(value: object) -> str:
    """A value's kind, in a template author's words."""
    kinds = {str: "a text", dict: "a mapping", list: "a list", tuple: "a tuple", bool: "a truth value", int: "a number"}
    if value is None:
        return "none"
    if isinstance(value, Undefined):
        return "a missing value"
    return kinds.get(type(value), "a number" if isinstance(value, float) else "a function or object")


def named(value: object) -> str:
    """A value's kind, and its name where it is missing."""
    return f"a missing value ({value._undefined_message})" if isinstance(value, Undefined) else kind(value)
