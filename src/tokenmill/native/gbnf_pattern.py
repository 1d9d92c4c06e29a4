"""Regular expressions of JSON schemas (ECMAScript's) as grammars of JSON strings.

Anchors, classes, groups, choices and counts; no assertions and no back references. As JSON schema has it, a pattern
without anchors may match anywhere in the string.

    ^a|b$   ->   "a" any*  |  any* "b"
"""

from dataclasses import replace

from tokenmill.native.gbnf import (
    EMPTY,
    NEVER,
    Alt,
    Chars,
    Node,
    Ranges,
    Ref,
    Rep,
    Rules,
    Seq,
    alt,
    nullable,
    seq,
    weight,
)
from tokenmill.native.gbnf_strings import ALL, QUOTE, any_char, encoded, union, without

MOST_PLACES = 2000  # llama.cpp may be at each of them at the same time
_DEEPEST = 50
_START = Ref("^")
_END = Ref("$")
_DIGITS: Ranges = ((48, 57),)
_WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = (
    (9, 13),
    (32, 32),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {
    "d": _DIGITS,
    "w": _WORDS,
    "s": _SPACES,
    "D": without(_DIGITS),
    "W": without(_WORDS),
    "S": without(_SPACES),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


class Unsupported(ValueError):
    """What the expression holds that no grammar of ours says."""


def string_like(rules: Rules, pattern: str, least: int = 0, most: int | None = None) -> Node:
    """A string, with its quotes, that a pattern finds and that has so many characters; Unsupported."""
    reader = _Reader(pattern)
    node = reader.choices(0)
    if reader.at < len(pattern):
        raise Unsupported("a ) without its (")
    branches = node.choices if isinstance(node, Alt) else (node,)
    bounded = alt([_bounded(_whole(branch), least, most) for branch in branches])
    if weight(bounded) > MOST_PLACES and not (isinstance(bounded, Rep) and isinstance(bounded.what, Chars)):
        raise Unsupported(f"more than {MOST_PLACES} characters in all its repetitions")
    inner = _translated(rules, bounded)
    return NEVER if inner == NEVER else rules.add("pattern", seq(QUOTE, inner, QUOTE))


def _whole(branch: Node) -> Node:
    """A branch for the whole string: what an anchor does not hold may be anything."""
    parts = list(branch.parts) if isinstance(branch, Seq) else [branch]
    anything = Rep(Chars(ALL), 0, None)
    begin: list[Node] = [] if parts and parts[0] == _START else [anything]
    end: list[Node] = [] if parts and parts[-1] == _END else [anything]
    parts = parts[len(parts) > 0 and parts[0] == _START :]
    parts = parts[: len(parts) - (len(parts) > 0 and parts[-1] == _END)]
    if not parts and (begin or end):  # "^", "$" or nothing: any string
        begin = [anything]
        end = []
    return seq(*begin, *parts, *end)


def _lengths(node: Node) -> tuple[int, int | None]:
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            each = [_lengths(part) for part in parts]
            mosts = [most for _, most in each if most is not None]
            return sum(least for least, _ in each), sum(mosts) if len(mosts) == len(each) else None
        case Alt(choices):
            each = [_lengths(choice) for choice in choices]
            mosts = [most for _, most in each if most is not None]
            return min((least for least, _ in each), default=0), max(mosts, default=0) if len(mosts) == len(
                each
            ) else None
        case Rep(what, least, most):
            shortest, longest = _lengths(what)
            return least * shortest, None if most is None or longest is None else most * longest
    raise Unsupported("^ or $ elsewhere than at the ends")


def _bounded(node: Node, least: int, most: int | None) -> Node:
    """A node with a bound on its length: exact where at most one class of characters is repeated freely."""
    shortest, longest = _lengths(node)
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return node
    if (longest is not None and longest < least) or (most is not None and shortest > most):
        return NEVER
    parts = list(node.parts) if isinstance(node, Seq) else [node]
    free = [at for at, part in enumerate(parts) if len(set(_lengths(part))) == 2]
    chosen = parts[free[0]] if len(free) == 1 else None
    if not (isinstance(chosen, Rep) and isinstance(chosen.what, Chars)):
        raise Unsupported("a length that minLength or maxLength would have to cut")
    fixed = shortest - chosen.least
    ends = [end for end in (chosen.most, None if most is None else most - fixed) if end is not None]
    parts[free[0]] = replace(chosen, least=max(chosen.least, least - fixed), most=min(ends, default=None))
    return seq(*parts)


def _translated(rules: Rules, node: Node) -> Node:
    match node:
        case Chars(ranges):
            return any_char(rules) if ranges == ALL else encoded(rules, ranges)
        case Seq(parts):
            return seq(*(_translated(rules, part) for part in parts))
        case Alt(choices):
            return alt([_translated(rules, choice) for choice in choices])
        case Rep(what, least, most):
            if most is None and nullable(what):
                raise Unsupported("an endless repetition of something that may be empty")
            return rules.repeat(_translated(rules, what), least, most)
    raise Unsupported("^ or $ elsewhere than at the ends")


class _Reader:
    """Reads a pattern into nodes whose characters are decoded ones."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def _peek(self, size: int = 1) -> str:
        return self.text[self.at : self.at + size]

    def _take(self) -> str:
        found = self._peek()
        if not found:
            raise Unsupported("an end in the middle of something")
        self.at += 1
        return found

    def choices(self, depth: int) -> Node:
        """Up to the end or a closing parenthesis."""
        if depth > _DEEPEST:
            raise Unsupported(f"groups more than {_DEEPEST} deep")
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            found.append(self._sequence(depth))
        return alt(found)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom(depth)
            parts.append(part if part in (_START, _END) else self._counted(part))
        return seq(*parts)

    def _atom(self, depth: int) -> Node:
        char = self._take()
        if char in "^$":
            return _START if char == "^" else _END
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == ".":
            return Chars(without(_LINE_ENDS))
        if char == "\\":
            return Chars(self._escape())
        if char in "*+?{}]":
            raise Unsupported(f"a {char} that stands for itself: write \\{char}")
        return _one(char)

    def _group(self, depth: int) -> Node:
        if self._peek() == "?":
            close = self.text.find(">", self.at)
            if self._peek(2) == "?:":
                self.at += 2
            elif self._peek(2) == "?<" and self._peek(3) not in ("?<=", "?<!") and close > 0:
                self.at = close + 1
            else:
                raise Unsupported(f"({self._peek(3)}")
        inner = self.choices(depth + 1)
        if self._peek() != ")":
            raise Unsupported("a ( without its )")
        self.at += 1
        return inner

    def _counted(self, part: Node) -> Node:
        sign = self._peek()
        if sign == "" or sign not in "*+?{":
            return part
        self.at += 1
        if sign == "{":
            inner, brace, _ = self.text[self.at :].partition("}")
            least, comma, most = inner.partition(",")
            if not (brace and _is_count(least) and (most == "" or _is_count(most))):
                raise Unsupported("a { that stands for itself: write \\{")
            self.at += len(inner) + 1
            bounds = int(least), int(most) if most else None if comma else int(least)
        else:
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if self._peek() == "?":  # lazy: the same strings
            self.at += 1
        if self._peek() != "" and self._peek() in "*+?{":
            raise Unsupported("a repetition of a repetition without a group")
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise Unsupported("a count whose end is before its beginning")
        if part == EMPTY or bounds == (0, 0):
            return EMPTY
        return part if bounds == (1, 1) else Rep(part, *bounds)

    def _class(self) -> Node:
        negated = self._peek() == "^"
        self.at += negated
        sets: list[Ranges] = []
        while self._peek() != "]":
            low = self._member()
            if self._peek() == "-" and self._peek(2) != "-]":
                self.at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise Unsupported("a range between classes")
                if low[0][0] > high[0][0]:
                    raise Unsupported("a range whose end is before its beginning")
                low = ((low[0][0], high[0][0]),)
            sets.append(low)
        self.at += 1
        found = union(sets)
        ranges = without(found) if negated else without(without(found))  # never half of a surrogate pair
        return Chars(ranges) if ranges else NEVER

    def _member(self) -> Ranges:
        char = self._take()
        if char == "\\":
            return ((8, 8),) if self._peek() == "b" and self._take() else self._escape()
        return ((ord(char), ord(char)),)

    def _escape(self) -> Ranges:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not (char == "0" and self._peek().isdigit()):
            return ((_CONTROLS[char], _CONTROLS[char]),)
        if char in "xu":
            point = self._hex(2 if char == "x" else 4)
            return ((point, point),)
        if char.isascii() and char.isalnum():
            raise Unsupported(f"\\{char}")
        return ((ord(char), ord(char)),)

    def _hex(self, size: int) -> int:
        if self._peek() == "{" and size == 4:
            digits, _, _ = self.text[self.at + 1 :].partition("}")
            self.at += len(digits) + 2
        else:
            digits = self._peek(size)
            self.at += size
            if len(digits) < size:
                raise Unsupported("an escape that is too short")
        if not digits or len(digits) > 6 or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise Unsupported(f"an escape of {digits}")
        point = int(digits, 16)
        if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
            raise Unsupported("half of a surrogate pair")
        return point


def _one(char: str) -> Node:
    point = ord(char)
    if 0xD800 <= point <= 0xDFFF:
        raise Unsupported("half of a surrogate pair")
    return Chars(((point, point),))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
