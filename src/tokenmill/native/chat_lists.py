"""What a chat template does with lists, mappings and ranges: filters and methods of bounded cost.

Lists are paid for before they are made. Only texts and numbers are put in order or counted as the same: comparing
lists of lists of lists could take for ever.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Undefined
from jinja2.utils import Namespace

from tokenmill.native.chat_sandbox import Sandbox

_MOST_RANGE = 100_000


class Lists:
    """The words for values with parts; the sandbox keeps the budget."""

    def __init__(self, made: Sandbox) -> None:
        self.made = made

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names after `|`."""
        return {
            "length": len,
            "count": len,
            "first": self.first,
            "last": self.last,
            "list": self.parts,
            "items": self.items,
            "reverse": self.reverse,
            "map": self.each,
            "sort": self.sort,
            "dictsort": self.dictsort,
            "unique": self.unique,
            "sum": self.total,
            "min": self.least,
            "max": self.most,
            "select": self._choice(wanted=True, by_attribute=False),
            "reject": self._choice(wanted=False, by_attribute=False),
            "selectattr": self._choice(wanted=True, by_attribute=True),
            "rejectattr": self._choice(wanted=False, by_attribute=True),
        }

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Names that are called."""
        return {"range": self.range, "namespace": self.namespace, "dict": self.mapping}

    def methods(self) -> dict[type, dict[str, Callable[..., Any]]]:
        """Names after a dot, by the kind of value before it."""
        return {
            dict: {"get": self.get, "keys": self.parts, "values": self.values, "items": self.items},
            list: {"append": self.append, "pop": self.pop},
        }

    def parts(self, value: Any) -> list[Any]:
        """The parts of whatever has some, in a list of their own."""
        if value is None or isinstance(value, Undefined):
            return []
        if isinstance(value, str | range):
            self.made.budget.collect(len(value))
        elif isinstance(value, list | tuple | dict):
            self.made.budget.copy(len(value))
        else:
            raise TypeError("this value has no parts")
        return list(value)

    def member(self, item: Any, path: Any) -> Any:
        """`a.b.0` of an item."""
        self.made.budget.spend(1)
        for name in str(path).split("."):
            item = self.made.getitem(item, int(name) if name.isdigit() else name)
        return item

    def range(self, *ends: int) -> object:
        """Numbers in a row."""
        counted = range(*ends)
        if len(counted) > _MOST_RANGE:
            raise OverflowError(f"a range is longer than {_MOST_RANGE}")
        return counted

    def mapping(self, given: Any = (), /, **named: Any) -> dict[Any, Any]:
        """`dict(...)` of a mapping or pairs, and names."""
        pairs = self.items(given) if isinstance(given, dict) else self.parts(given)
        self.made.budget.collect(2 * (len(pairs) + len(named)))
        return {**{self.made.values.key(name): value for name, value in pairs}, **named}

    def namespace(self, given: Any = (), /, **named: Any) -> Namespace:
        """A place to keep values that a loop's body changes."""
        return Namespace(self.mapping(given, **named))

    def append(self, items: list[Any], item: Any) -> list[Any]:
        """Mutates the list."""
        self.made.budget.collect(1)
        items.append(item)
        return items

    def pop(self, items: list[Any], place: int = -1) -> Any:
        """Mutates the list."""
        self.made.budget.copy(len(items))
        return items.pop(place)

    def get(self, mapping: Mapping[Any, Any], name: Any, default: Any = None) -> Any:
        """A mapping's value, or the default."""
        found = mapping.get(self.made.values.key(name), default)
        self.made.values.note("get", found)
        return found

    def values(self, mapping: Mapping[Any, Any]) -> list[Any]:
        """A mapping's values."""
        self.made.budget.copy(len(mapping))
        return list(mapping.values())

    def items(self, value: Any) -> list[tuple[Any, Any]]:
        """A mapping's pairs; nothing has none."""
        if value is None or isinstance(value, Undefined):
            return []
        if not isinstance(value, dict):
            raise TypeError("only a mapping has items")
        self.made.budget.collect(len(value))
        return list(value.items())

    def first(self, value: Any) -> Any:
        """The first part."""
        parts = self.parts(value)
        return parts[0] if parts else self.made.undefined("the first of nothing is missing")

    def last(self, value: Any) -> Any:
        """The last part."""
        parts = self.parts(value)
        return parts[-1] if parts else self.made.undefined("the last of nothing is missing")

    def reverse(self, value: Any) -> Any:
        """The parts from the end, or a text backwards."""
        return self.made.values.sliced(value, None, None, -1) if isinstance(value, str) else self.parts(value)[::-1]

    def each(self, value: Any, *args: Any, attribute: Any = None, default: Any = None, **kwargs: Any) -> list[Any]:
        """`map`: a member of each part, or a filter applied to each."""
        parts = self.parts(value)
        if attribute is None:
            name, *rest = args
            return [self.made.call_filter(str(name), part, rest, kwargs) for part in parts]
        found = [self.member(part, attribute) for part in parts]
        return found if default is None else [default if isinstance(part, Undefined) else part for part in found]

    def _choice(self, *, wanted: bool, by_attribute: bool) -> Callable[..., list[Any]]:
        def passes(part: Any, attribute: Any, test: tuple[Any, ...]) -> bool:
            looked_at = self.member(part, attribute) if by_attribute else part
            return bool(self.made.call_test(str(test[0]), looked_at, test[1:]) if test else looked_at)

        def choose(value: Any, *args: Any) -> list[Any]:
            attribute, test = (args[0], args[1:]) if by_attribute else (None, args)
            return [part for part in self.parts(value) if passes(part, attribute, test) == wanted]

        return choose

    def sort(self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
        """Parts in order; letters large and small alike unless asked."""
        keyed = [(part if attribute is None else self.member(part, attribute), part) for part in self.parts(value)]
        return self._ordered(keyed, reverse=reverse, exact=case_sensitive)

    def dictsort(
        self, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
    ) -> list[tuple[Any, Any]]:
        """A mapping's pairs in order."""
        place = {"key": 0, "value": 1}[by]
        return self._ordered([(pair[place], pair) for pair in self.items(value)], reverse=reverse, exact=case_sensitive)

    def _ordered(self, keyed: list[tuple[Any, Any]], *, reverse: bool, exact: bool) -> list[Any]:
        self.made.budget.collect(len(keyed))
        keys = [_scalar(key) for key, _ in keyed]
        if not exact:
            keys = [key.lower() if isinstance(key, str) else key for key in keys]
        places = sorted(range(len(keys)), key=keys.__getitem__, reverse=bool(reverse))
        return [keyed[place][1] for place in places]

    def unique(self, value: Any) -> list[Any]:
        """Each part once."""
        return list({_scalar(part): None for part in self.parts(value)})

    def total(self, value: Any, attribute: Any = None, start: float = 0) -> Any:
        """The sum of numbers."""
        parts = self.parts(value)
        found = parts if attribute is None else [self.member(part, attribute) for part in parts]
        if not all(isinstance(number, int | float) for number in (start, *found)):
            raise TypeError("only numbers are added up")
        return sum(found, start)

    def least(self, value: Any) -> Any:
        """The smallest part."""
        return min(map(_scalar, self.parts(value)), default=None)

    def most(self, value: Any) -> Any:
        """The largest part."""
        return max(map(_scalar, self.parts(value)), default=None)


def _scalar(value: Any) -> Any:
    if not isinstance(value, str | int | float):
        raise TypeError("only texts and numbers have an order")
    return value
