"""The words of a chat template: filters, tests, functions and methods, each of bounded cost.

They are the words llama.cpp's engine knows and a few of Jinja's that cannot grow anything, and do what Jinja's word of
that name does. Texts are paid for before they are made. `tojson` writes JSON as the makers of models do: no HTML
escapes, other scripts as they are, ", " and ": " between.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import Macro

from tokenmill.native.chat_budget import Limits, Refusal
from tokenmill.native.chat_lists import Lists
from tokenmill.native.chat_sandbox import Function, Sandbox

_MOST_INDENT = 64
_MOST_TIME_FORMAT = 100  # characters, as in llama.cpp
_WORDS = re.compile(r"([-\s({\[<]+)")
_FIELD = re.compile(r"\{\{|\}\}|\{(\w*)\}|[{}]")
_METHODS: tuple[Callable[..., Any], ...] = (
    str.upper,
    str.lower,
    str.title,
    str.capitalize,
    str.swapcase,
    str.casefold,
    str.strip,
    str.lstrip,
    str.rstrip,
    str.startswith,
    str.endswith,
    str.find,
    str.rfind,
    str.count,
    str.removeprefix,
    str.removesuffix,
    str.partition,
    str.rpartition,
    str.isdigit,
    str.isalpha,
    str.isalnum,
    str.isspace,
    str.islower,
    str.isupper,
)
_ITERABLE = (dict, list, tuple, str, range, Undefined)


def sandbox(limits: Limits) -> Sandbox:
    """A sandbox that knows the words."""
    made = Sandbox(limits)
    lists = Lists(made)
    texts = _Texts(made)
    nothing = {"items": lists.items}
    missing = dict.fromkeys(("strip", "upper", "lower", "title", "capitalize", "replace"), lambda *_args: "")
    made.methods = {
        **lists.methods(),
        str: texts.methods(),
        type(None): nothing,
        made.undefined: {**nothing, **missing},
    }
    filters = {**lists.filters(), **texts.filters(), **_NUMBER_FILTERS, "default": _default, "d": _default}
    made.filters = {name: _watched(made, f"filter {name}", run) for name, run in filters.items()}
    made.tests = {name: _watched(made, f"test {name}", run) for name, run in _tests(made).items()}
    functions = {**lists.functions(), "raise_exception": _refuse}
    made.globals = {name: Function(name, run) for name, run in functions.items()}
    return made


def clock(now: datetime) -> Function:
    """`strftime_now`: the date and time as the template wants them."""

    def strftime_now(form: str) -> str:
        if len(form) > _MOST_TIME_FORMAT:
            raise ValueError("the form of a date is too long")
        return now.strftime(form)

    return Function("strftime_now", strftime_now)


def _watched(made: Sandbox, operation: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def word(value: Any, *args: Any, **kwargs: Any) -> Any:
        made.budget.spend(10)
        made.values.note(operation, value)
        return run(value, *args, **kwargs)

    return word


def _refuse(message: object = "") -> None:
    raise Refusal(str(message))


def _default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, Undefined) or (boolean and not value) else value


def _whole(value: Any, default: Any = 0, base: int = 10) -> Any:
    try:
        return int(value, base) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return int(number) if (number := _real(value, None)) is not None and abs(number) < 2**63 else default


def _real(value: Any, default: Any = 0.0) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


_NUMBER_FILTERS: dict[str, Callable[..., Any]] = {"int": _whole, "float": _real, "abs": abs}


def _tests(made: Sandbox) -> dict[str, Callable[..., bool]]:
    """Names after `is`."""

    def ordered(name: str) -> Callable[[Any, Any], bool]:
        return lambda value, other: made.values.compared(value, name, other)

    named: dict[str, Callable[..., bool]] = {
        "defined": lambda value: not isinstance(value, Undefined),
        "undefined": lambda value: isinstance(value, Undefined),
        "none": lambda value: value is None,
        "boolean": lambda value: isinstance(value, bool),
        "true": lambda value: value is True,
        "false": lambda value: value is False,
        "string": lambda value: isinstance(value, str),
        "number": lambda value: isinstance(value, int | float),
        "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "float": lambda value: isinstance(value, float),
        "mapping": lambda value: isinstance(value, dict),
        "iterable": lambda value: isinstance(value, _ITERABLE),
        "sequence": lambda value: isinstance(value, _ITERABLE),
        "callable": lambda value: isinstance(value, Function | Macro),
        "sameas": lambda value, other: value is other,
        "odd": lambda value: value % 2 == 1,
        "even": lambda value: value % 2 == 0,
        "divisibleby": lambda value, other: value % other == 0,
        "lower": lambda value: isinstance(value, str) and value.islower(),
        "upper": lambda value: isinstance(value, str) and value.isupper(),
        "in": lambda value, container: made.values.contains(container, value),
    }
    for operation, names in {
        "eq": ("eq", "equalto", "=="),
        "ne": ("ne", "!="),
        "gt": ("gt", "greaterthan", ">"),
        "lt": ("lt", "lessthan", "<"),
        "gteq": ("ge", ">="),
        "lteq": ("le", "<="),
    }.items():
        named |= dict.fromkeys(names, ordered(operation))
    return named


class _Texts:
    """The words for texts; the sandbox keeps the budget."""

    def __init__(self, made: Sandbox) -> None:
        self.made = made

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names after `|`."""
        named: dict[str, Callable[..., Any]] = {
            "string": self.string,
            "safe": self.made.values.text,
            "trim": self._of(str.strip),
            "replace": self.replaced,
            "join": self.join,
            "indent": self.indent,
            "tojson": self.tojson,
        }
        others: dict[str, Callable[..., str]] = {"upper": str.upper, "lower": str.lower, "capitalize": str.capitalize}
        return named | {name: self._of(method) for name, method in {**others, "title": _title}.items()}

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Names after a text and a dot."""
        return {
            **{method.__name__: self._paid(method) for method in _METHODS},
            "split": self.split,
            "rsplit": self.rsplit,
            "splitlines": self.splitlines,
            "replace": self.replace,
            "join": lambda text, items: self.join(items, text),
            "format": self.format,
        }

    def _paid(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method whose result is about as long as its text, or shorter."""
        strips = method in {str.strip, str.lstrip, str.rstrip}

        def run(text: str, *args: Any, **kwargs: Any) -> Any:
            self.made.budget.make(len(text))
            if strips and args and isinstance(args[0], str):
                self.made.budget.read(len(text) * len(args[0]))  # each letter is looked up among all of these
            return method(text, *args, **kwargs)

        return run

    def _of(self, method: Callable[..., str]) -> Callable[..., str]:
        """The same as a filter, on any value's text."""
        paid = self._paid(method)
        return lambda value, *args: str(paid(self._text(value), *args))

    def _text(self, value: Any) -> str:
        return "" if isinstance(value, Undefined) else self.made.values.text(value)

    def string(self, value: Any) -> str:
        """The value as Python writes it."""
        self.made.values.note("deep", value)
        return self.made.values.text(value)

    def split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        """The parts between separators."""
        self._pay_for_parts(text, sep)
        return text.split(sep, maxsplit)

    def rsplit(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        """The parts between separators, counted from the end."""
        self._pay_for_parts(text, sep)
        return text.rsplit(sep, maxsplit)

    def splitlines(self, text: str, keepends: bool = False) -> list[str]:
        """The lines."""
        self._pay_for_parts(text, None)
        return text.splitlines(keepends)

    def _pay_for_parts(self, text: str, sep: str | None) -> None:
        self.made.budget.make(len(text))
        self.made.budget.collect(text.count(sep) if sep else len(text) // 8)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        """The text with one part in place of another."""
        self.made.budget.read(len(text))
        self.made.budget.make(len(text) + text.count(old) * max(0, len(new) - len(old)))
        return text.replace(old, new, count)

    def replaced(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        """The same as a filter, on any value's text."""
        return self.replace(self._text(value), self._text(old), self._text(new), -1 if count is None else count)

    def format(self, text: str, *args: Any, **kwargs: Any) -> str:
        """`{}`, `{0}` and `{name}` filled in; a field that looks into a value or sets a width is refused."""
        waiting = iter(args)

        def field(match: re.Match[str]) -> str:
            name = match[1]
            if match[0] in {"{{", "}}"}:
                return match[0][0]
            if name is None:
                raise ValueError("a form has a field that is not plain")
            value = next(waiting) if not name else args[int(name)] if name.isdigit() else kwargs[name]
            made = self.made.values.text(value)
            self.made.budget.make(len(made))
            return made

        self.made.budget.make(len(text))
        try:
            return _FIELD.sub(field, text)
        except StopIteration:
            raise IndexError("a form has more fields than values") from None

    def indent(self, value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        """The text with its lines moved in."""
        text = self._text(value)
        ahead = width if isinstance(width, str) else " " * min(int(width), _MOST_INDENT)
        lines = text.count("\n") + 1
        self.made.budget.collect(lines)
        self.made.budget.make(len(text) + lines * len(ahead))
        head, *others = text.split("\n")
        moved = [ahead + line if line or blank else line for line in others]
        return "\n".join([ahead + head if first else head, *moved])

    def join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        """The parts' texts with another between them."""
        lists = Lists(self.made)
        parts = lists.parts(value)
        texts = [self.made.values.text(part if attribute is None else lists.member(part, attribute)) for part in parts]
        between = self._text(d)
        self.made.budget.make(sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """The value as JSON; what is missing is null."""
        self.made.values.note("deep", value)
        if indent is not None:
            indent = min(int(indent), _MOST_INDENT)
        self.made.budget.make(self.made.values.measured(value, 6 if ensure_ascii else 2, indent or 0))
        return json.dumps(
            value,
            ensure_ascii=bool(ensure_ascii),
            indent=indent,
            separators=None if separators is None else (str(separators[0]), str(separators[1])),
            sort_keys=bool(sort_keys),
            default=_null_for_missing,
        )


def _title(text: str) -> str:
    """Each word with a large first letter, as Jinja does it, which is not as Python does it."""
    return "".join(word[:1].upper() + word[1:].lower() for word in _WORDS.split(text))


def _null_for_missing(value: object) -> None:
    if not isinstance(value, Undefined):
        raise TypeError("only texts, numbers, lists and mappings can be JSON")
