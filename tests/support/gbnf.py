"""GBNF read and followed in plain Python, for tests: which texts a grammar allows, and random ones of them."""

import random
import re
from typing import Any

TOKEN = re.compile(r'\s*("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[a-zA-Z0-9-]+|\{\d+(?:,\d*)?\}|[()|*+?])')
CODE = re.compile(r"\\x(..)|\\u(.{4})|\\U(.{8})|\\(.)|(.)", re.DOTALL)
PLAIN = {"n": "\n", "r": "\r", "t": "\t"}


class Gbnf:
    """A grammar. Nodes are ("text", s), ("chars", [(a, b)]), ("rule", name), ("seq", [..]), ("alt", [..]),
    ("rep", node, least, most)."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Any] = {}
        for line in text.splitlines():
            name, _, right = line.partition(" ::= ")
            self.tokens, self.at = TOKEN.findall(right), 0
            assert "".join(self.tokens) == "".join(TOKEN.sub(r"\1", right).split("\0")).strip(), right
            self.rules[name] = self._alt()
            assert self.at == len(self.tokens), right
        self.heights: dict[str, int] = {}
        self._measure()

    # ---- reading

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _alt(self) -> Any:
        found = [self._seq()]
        while self._peek() == "|":
            self.at += 1
            found.append(self._seq())
        return ("alt", found)

    def _seq(self) -> Any:
        parts: list[Any] = []
        while self._peek() not in ("", "|", ")"):
            token = self._peek()
            self.at += 1
            if token == "(":
                parts.append(self._alt())
                self.at += 1
            elif token[0] == '"':
                parts.append(("text", "".join(map(chr, _codes(token[1:-1])))))
            elif token[0] == "[":
                parts.append(("chars", _ranges(token[1:-1])))
            elif token in "*+?" or token[0] == "{":
                parts.append(("rep", parts.pop(), *_bounds(token)))
            else:
                parts.append(("rule", token))
        return ("seq", parts)

    # ---- following

    def allows(self, text: str) -> bool:
        """Whether a whole text is in the grammar."""
        self.text, self.memo = text, dict[tuple[int, int], frozenset[int]]()
        return len(text) in self._ends(self.rules["root"], 0)

    def _ends(self, node: Any, at: int) -> frozenset[int]:
        key = (id(node), at)
        if key not in self.memo:
            self.memo[key] = frozenset(self._found(node, at))
        return self.memo[key]

    def _found(self, node: Any, at: int) -> set[int]:
        kind, value = node[:2]
        if kind == "text":
            return {at + len(value)} if self.text.startswith(value, at) else set()
        if kind == "chars":
            return {at + 1} if at < len(self.text) and _within(self.text[at], value) else set()
        if kind == "rule":
            return set(self._ends(self.rules[value], at))
        if kind == "alt":
            return {end for one in value for end in self._ends(one, at)}
        if kind == "seq":
            ends = {at}
            for part in value:
                ends = {end for begin in ends for end in self._ends(part, begin)}
            return ends
        return self._repeated(value, node[2], node[3], at)

    def _repeated(self, what: Any, least: int, most: int | None, at: int) -> set[int]:
        ends, found, times = {at}, {at} if least == 0 else set[int](), 0
        while ends and (most is None or times < most):
            before, times = len(found), times + 1
            ends = {end for begin in ends for end in self._ends(what, begin)}
            found |= ends if times >= least else set()
            if times > least and len(found) == before:
                break
        return found

    # ---- drawing

    def draw(self, chance: random.Random, patience: int = 40) -> str:
        """A text of the grammar; after `patience` choices, the shortest way out."""
        self.chance, self.left = chance, patience
        return self._draw(self.rules["root"])

    def _draw(self, node: Any) -> str:
        kind, value = node[:2]
        if kind == "text":
            return str(value)
        if kind == "chars":
            first, last = self.chance.choice(value)
            return chr(self.chance.randint(first, min(last, first + 200)))
        if kind == "rule":
            return self._draw(self.rules[value])
        if kind == "seq":
            return "".join(map(self._draw, value))
        self.left -= 1
        if kind == "alt":
            if self.left > 0:
                return self._draw(self.chance.choice(value))
            return self._draw(min(value, key=self._height))
        more = 0 if self.left <= 0 else self.chance.randint(0, 3)
        return "".join(self._draw(value) for _ in range(node[2] + min(more, (node[3] or 3) - node[2])))

    def _measure(self) -> None:
        while True:
            new = {name: self._height(node) for name, node in self.rules.items()}
            if new == self.heights:
                return
            self.heights = new

    def _height(self, node: Any) -> int:
        kind, value = node[:2]
        if kind == "rule":
            return self.heights.get(value, 1_000_000) + 1
        if kind == "alt":
            return min(map(self._height, value))
        if kind == "seq":
            return max(map(self._height, value), default=0)
        return self._height(value) if kind == "rep" and node[2] > 0 else 0


def _codes(text: str) -> list[int]:
    found = []
    for x, u, wide, escaped, plain in CODE.findall(text):
        code = x or u or wide
        found.append(int(code, 16) if code else ord(PLAIN.get(escaped, escaped) or plain))
    return found


def _ranges(text: str) -> list[tuple[int, int]]:
    found = []
    for part in re.findall(r"((?:\\x..|\\u.{4}|\\U.{8}|[^\\-]))(?:-(\\x..|\\u.{4}|\\U.{8}|[^\\-]))?", text):
        first, last = _codes(part[0])[0], _codes(part[1] or part[0])[0]
        found.append((first, last))
    return found


def _bounds(token: str) -> tuple[int, int | None]:
    if token in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token]
    least, comma, most = token[1:-1].partition(",")
    return int(least), int(most) if most else None if comma else int(least)


def _within(char: str, ranges: list[tuple[int, int]]) -> bool:
    return any(first <= ord(char) <= last for first, last in ranges)
