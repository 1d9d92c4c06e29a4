"""A grammar in llama.cpp's GBNF, as values: built, checked and written. Knows nothing of JSON.

llama.cpp copies what is repeated and turns a count over 2000 silently into "any number" (llama-grammar.cpp), so
larger counts are built out of blocks here:  x{0,n} = block{0,q-1} x{0,999} | block{q} x{0,r}  with n = 1000 q + r.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Union

Ranges = tuple[tuple[int, int], ...]

BLOCK = 1000
MOST_COUNTED = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
MOST_REPEATED = 100_000  # of one thing
MOST_COPIES = 50_000  # in one grammar
MOST_RULES = 20_000


@dataclass(frozen=True, slots=True)
class Lit:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of ranges of code points, both ends included."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; nothing at all where there are none."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of them; impossible where there are none."""

    choices: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """As often as this; `most` None is without end."""

    what: "Node"
    least: int
    most: int | None


Node = Union[Lit, Chars, Ref, Seq, Alt, Rep]  # noqa: UP007 - names of later classes
EMPTY = Seq(())
NEVER = Alt(())


class TooLarge(ValueError):
    """The grammar would be too large for llama.cpp; says what is."""


class Endless(ValueError):
    """A rule that never comes to an end, or that begins with itself; the arguments name them."""


def seq(*parts: Node) -> Node:
    """One after the other."""
    flat: list[Node] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if one == NEVER:
                return NEVER
            if isinstance(one, Lit) and flat and isinstance(flat[-1], Lit):
                flat[-1] = Lit(flat[-1].text + one.text)
            else:
                flat.append(one)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(choices: Iterable[Node]) -> Node:
    """One of them, each once: the same choice twice doubles llama.cpp's work with every step."""
    flat: dict[Node, None] = {}
    for choice in choices:
        flat.update(dict.fromkeys(choice.choices if isinstance(choice, Alt) else (choice,)))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


class Rules:
    """Rules of one grammar; the same right-hand side is one rule."""

    def __init__(self) -> None:
        self._rules: dict[str, Node] = {}
        self._names: dict[Node, Ref] = {}
        self._counts: dict[str, int] = {}
        self._copies = 0

    def reserve(self, name: str) -> Ref:
        """A name for a rule that is told later."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if sum(self._counts.values()) > MOST_RULES:
            raise TooLarge(f"more than {MOST_RULES} rules")
        return Ref(name if count == 1 else f"{name}-{count}")

    def tell(self, ref: Ref, node: Node) -> None:
        """What a reserved name stands for."""
        self._rules[ref.name] = node

    def add(self, name: str, node: Node) -> Node:
        """A rule; what is impossible stays visible."""
        if node in (NEVER, EMPTY) or isinstance(node, Ref):
            return node
        found = self._names.get(node)
        if found is None:
            found = self._names[node] = self.reserve(name)
            self.tell(found, node)
        return found

    def repeat(self, what: Node, least: int, most: int | None) -> Node:
        """As often as this, exactly."""
        if (most is not None and most < least) or (what == NEVER and least > 0):
            return NEVER
        if most == 0 or what in (NEVER, EMPTY):
            return EMPTY
        count = least if most is None else most
        if count > MOST_REPEATED:
            raise TooLarge(f"{count} repetitions")
        if isinstance(what, Seq | Alt | Rep) and count > 1:
            what = self.add("item", what)
        if count <= MOST_COUNTED:
            self._copies += count
            if self._copies > MOST_COPIES:
                raise TooLarge(f"more than {MOST_COPIES} repetitions in all")
            return what if (least, most) == (1, 1) else Rep(what, least, most)
        return self._in_blocks(what, least, most)

    def _in_blocks(self, what: Node, least: int, most: int | None) -> Node:
        block = self.add("block", self.repeat(what, BLOCK, BLOCK))
        begin = seq(self.repeat(block, least // BLOCK, least // BLOCK), self.repeat(what, least % BLOCK, least % BLOCK))
        if most is None:
            return seq(begin, self.repeat(what, 0, None))
        blocks, rest = divmod(most - least, BLOCK)
        if blocks == 0:
            return seq(begin, self.repeat(what, 0, rest))
        fewer = seq(self.repeat(block, 0, blocks - 1), self.repeat(what, 0, BLOCK - 1))
        all_of_them = seq(self.repeat(block, blocks, blocks), self.repeat(what, 0, rest))
        return seq(begin, self.add("many", alt((fewer, all_of_them))))

    def text(self, root: Node) -> str:
        """The grammar; Endless where llama.cpp would refuse it or no answer could end."""
        rules = _reached({"root": root} | self._rules)
        _check_ends(rules)
        _check_beginnings(rules)
        return "".join(f"{name} ::= {_written(node)}\n" for name, node in rules.items())


def _reached(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules that the root leads to."""
    found = {"root"}
    waiting = ["root"]
    while waiting:
        new = set(_named(rules[waiting.pop()])) - found
        found |= new
        waiting += new
    return {name: node for name, node in rules.items() if name in found}


def _named(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _named(part)
        case Rep(what, _, _):
            yield from _named(what)


def weight(node: Node) -> int:
    """Characters and rules in a node with its repetitions written out."""
    match node:
        case Seq(parts) | Alt(parts):
            return sum(map(weight, parts))
        case Rep(what, least, most):
            return weight(what) * max(1, least if most is None else most)
        case Lit(text):
            return len(text)
    return 1


def nullable(node: Node, empty: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether a node may be nothing; `empty` names rules that may."""
    match node:
        case Lit(text):
            return not text
        case Chars():
            return False
        case Ref(name):
            return name in empty
        case Seq(parts):
            return all(nullable(part, empty) for part in parts)
        case Alt(choices):
            return any(nullable(choice, empty) for choice in choices)
        case Rep(what, least, _):
            return least == 0 or nullable(what, empty)


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Ref(name):
            return name in ending
        case Seq(parts):
            return all(_ends(part, ending) for part in parts)
        case Alt(choices):
            return any(_ends(choice, ending) for choice in choices)
        case Rep(what, least, _):
            return least == 0 or _ends(what, ending)
    return True


def _check_ends(rules: dict[str, Node]) -> None:
    """Every rule can come to an end: an answer that enters one that cannot would fill the context."""
    ending: set[str] = set()
    while found := [name for name, node in rules.items() if name not in ending and _ends(node, ending)]:
        ending.update(found)
    if len(ending) < len(rules):
        raise Endless(*(name for name in rules if name not in ending))


def _first(node: Node, empty: set[str]) -> Iterator[str]:
    """Rules that may be entered before any character."""
    match node:
        case Ref(name):
            yield name
        case Seq(parts):
            for part in parts:
                yield from _first(part, empty)
                if not nullable(part, empty):
                    return
        case Alt(choices):
            for choice in choices:
                yield from _first(choice, empty)
        case Rep(what, _, _):
            yield from _first(what, empty)


def _check_beginnings(rules: dict[str, Node]) -> None:
    empty: set[str] = set()
    while found := [name for name, node in rules.items() if name not in empty and nullable(node, empty)]:
        empty.update(found)
    waiting = {name: set(_first(node, empty)) for name, node in rules.items()}
    while free := [name for name, first in waiting.items() if not first]:
        for name in free:
            del waiting[name]
        for first in waiting.values():
            first.difference_update(free)
    if waiting:
        raise Endless(*waiting)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _written(node: Node, *, inside: bool = False) -> str:
    match node:
        case Lit(text):
            return '"' + "".join(_ESCAPES.get(char, char) for char in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_range(*one) for one in ranges) + "]"
        case Ref(name):
            return name
        case Seq(()):
            return '""'
        case Seq(parts):
            text = " ".join(_written(part, inside=isinstance(part, Alt | Seq)) for part in parts)
        case Alt(choices):
            text = " | ".join(_written(choice) for choice in choices)
        case Rep(what, least, most):
            return _written(what, inside=isinstance(what, Alt | Seq | Rep)) + _count(least, most)
    return f"({text})" if inside else text


def _count(least: int, most: int | None) -> str:
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    if short:
        return short
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _range(first: int, last: int) -> str:
    return _code(first) if first == last else f"{_code(first)}-{_code(last)}"


def _code(point: int) -> str:
    if point < 128 and chr(point).isalnum():
        return chr(point)
    return f"\\x{point:02X}" if point < 256 else f"\\u{point:04X}" if point < 65536 else f"\\U{point:08X}"
