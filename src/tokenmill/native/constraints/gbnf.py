r"""Translates GBNF, llama.cpp's grammar format, to the Lark dialect of llguidance without changing its language.

    root ::= "- " [a-z]+ "\n"      ->      start: R0
                                           R0: /\x{2d}\x{20}/ /[\x{61}-\x{7a}]/ + /\x{a}/

llguidance's own converter (`grammar_from("gbnf", ...)`) mistranslates `\u` escapes and rejects some rule names. Its
lexer also ends a terminal only where it cannot continue, so a terminal may consume what the next rule needs. Here, a
grammar without recursion becomes one regular expression; in any other grammar every terminal is a single character.
JSON schemas need no translation: see `grammar.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.errors import RequestRefused

TokenId = Callable[[str], int | None]
"""The id of the token with a text such as `<think>`; None where the text is not exactly one token."""

_TOKENS = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)|(?P<newline>\r\n|\r|\n)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)"""
    r"""|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<any>\.)|(?P<token>!?<[^>]*>)"""
    r"""|(?P<open>\()|(?P<close>\))|(?P<or>\|)|(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})""",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([trn\\"\[\]-])|([^\\])""", re.DOTALL
)
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}
_MOST_DIGITS = 9  # of a number of repetitions
_ANY = r"/[^\x{0}]/"  # llama.cpp lets nothing but `\x00` itself match a NUL


class _Reference(str):
    """The name of a rule in the body of another."""

    __slots__ = ()


_Part = str | _Reference | tuple[str, ...]
"""Lark text, a rule's name, or the characters of a literal."""


@dataclass(slots=True)
class _Rule:
    body: list[_Part] = field(default_factory=list)
    has_tokens: bool = False  # llguidance does not allow references to tokens in regular expressions


def lark_of(gbnf: str, token_id: TokenId) -> str:
    """The grammar in llguidance's dialect.

    RequestRefused where the text is not GBNF, has no rule `root` or refers to a rule that it does not define.
    """
    parser = _Parser(token_id)
    at = 0
    while at < len(gbnf):
        match = _TOKENS.match(gbnf, at)
        if match is None or match.lastgroup is None:
            raise _invalid(f"line {gbnf.count(chr(10), 0, at) + 1}: unexpected {gbnf[at : at + 40]!r}")
        parser.take(match.lastgroup, match[0])
        at = match.end()
    parser.end()
    return _rendered(parser.rules)


class _Parser:
    """Collects the rules. A newline ends a rule unless it is inside parentheses or follows `|` or `::=`.

    A group in parentheses becomes a rule too, because llguidance limits how deep parentheses may be nested.
    """

    def __init__(self, token_id: TokenId) -> None:
        self.rules: dict[str, _Rule] = {}
        self._token_id = token_id
        self._open: list[str] = []  # the current rule and the groups that are open in it
        self._name: str | None = None  # the last token where that was the name of a new rule
        self._is_empty = True  # the current alternative
        self._item = False  # whether `*` may follow
        self._repeat: str | None = None  # the last token where that was a repetition

    def take(self, kind: str, text: str) -> None:
        if kind == "space":
            return
        if not self._open:
            self._begin(kind, text)
            return
        rule = self.rules[self._open[-1]]
        if kind != "newline":
            self._add(rule, kind, text)
        elif len(self._open) == 1 and rule.body and rule.body[-1] != "|":
            self.end()

    def end(self) -> None:
        """End the current rule."""
        if self._name is not None or len(self._open) > 1:
            raise _invalid("it ends within a rule")
        if self._open:
            self._close()

    def _begin(self, kind: str, text: str) -> None:
        if kind == "name" and self._name is None:
            self._name = text
        elif kind == "define" and self._name is not None:
            self._start(self._name)
            self._name = None
        elif kind != "newline" or self._name is not None:
            raise _invalid(f"expected a rule's name and ::=, found {text[:40]!r}")

    def _add(self, rule: _Rule, kind: str, text: str) -> None:
        if kind == "repeat":
            self._add_repeat(rule, text)
            return
        self._repeat = None
        if kind == "define":
            raise _invalid("a rule must begin on a new line")
        if kind == "or":
            self._end_alternative(rule)
            rule.body.append("|")
            self._is_empty, self._item = True, False
        elif kind == "open":
            self._start(f"({len(self.rules)}")
        elif kind == "close":
            if len(self._open) == 1:
                raise _invalid("a ) has no (")
            name = self._close()
            self._append(self.rules[self._open[-1]], _Reference(name))
        else:
            self._append(rule, self._terminal(rule, kind, text))

    def _start(self, name: str) -> None:
        self.rules[name] = _Rule()
        self._open.append(name)
        self._is_empty, self._item = True, False

    def _close(self) -> str:
        self._end_alternative(self.rules[self._open[-1]])
        return self._open.pop()

    def _end_alternative(self, rule: _Rule) -> None:
        if self._is_empty:
            rule.body.append('""')

    def _append(self, rule: _Rule, part: _Part) -> None:
        rule.body.append(part)
        self._is_empty, self._item = False, True

    def _terminal(self, rule: _Rule, kind: str, text: str) -> _Part:
        if kind == "name":
            return _Reference(text)
        if kind == "any":
            return _ANY
        if kind == "set":
            return f"/{_set(text[1:-1])}/"
        if kind == "literal":
            return tuple(_code(one) for one, _ in _characters(text[1:-1]))
        rule.has_tokens = True
        name = text.removeprefix("!")
        number = name[2:-2] if re.fullmatch(r"<\[\d+\]>", name) else self._token_id(name)
        if number is None:
            raise _invalid(f"{name[:40]!r} is not a token of this model")
        return f"<[{'^' if text.startswith('!') else ''}{number}]>"

    def _add_repeat(self, rule: _Rule, text: str) -> None:
        if not self._item:
            raise _invalid(f"{text} has nothing to repeat")
        if self._repeat is not None:  # `a*?` is `(a*)?`
            if len(text) > 1 or len(self._repeat) > 1:
                raise _invalid(f"{text} must not follow {self._repeat}", hint="use parentheses")
            text = text if text == self._repeat else "*"
            rule.body.pop()
        elif text[0] == "{":
            text = _bounds(text)
        self._repeat = text
        if text in ("{0}", "{0,0}"):
            rule.body[-1] = '""'
        else:
            rule.body.append(text)


def _rendered(rules: dict[str, _Rule]) -> str:
    if "root" not in rules:
        raise _invalid("it has no rule called root")
    used, is_recursive = _reachable(rules)
    is_regular = not is_recursive and not any(rules[name].has_tokens for name in used)
    names = {name: f"{'R' if is_regular else 'r'}{index}" for index, name in enumerate(used)}

    def lark(part: _Part) -> str:
        if isinstance(part, _Reference):
            return names[part]
        if isinstance(part, str):
            return part
        if not part:
            return '""'
        return f"/{''.join(part)}/" if is_regular else f"({' '.join(f'/{one}/' for one in part)})"

    lines = [f"{names[name]}: {' '.join(map(lark, rules[name].body))}" for name in used]
    return "\n".join(['%llguidance {"no_forcing": true}', f"start: {names['root']}", *lines, ""])


def _reachable(rules: dict[str, _Rule]) -> tuple[list[str], bool]:
    """The rules that `root` uses, and whether one of them is recursive."""
    is_done: dict[str, bool] = {}  # False while the rules that it uses are visited
    is_recursive = False
    stack = [("root", False)]
    while stack:
        name, is_visited = stack.pop()
        if is_visited:
            is_done[name] = True
        elif name not in is_done:
            if name not in rules:
                raise _invalid(f"rule {name!r} is not defined")
            is_done[name] = False
            stack.append((name, True))
            stack.extend((part, False) for part in rules[name].body if isinstance(part, _Reference))
        else:
            is_recursive |= not is_done[name]
    return list(is_done), is_recursive


def _bounds(text: str) -> str:
    """`{m}`, `{m,}` or `{m,n}` without spaces, and without an upper bound that no answer can reach."""
    least, comma, most = "".join(text[1:-1].split()).partition(",")
    if len(least.lstrip("0")) > _MOST_DIGITS:
        raise _invalid(f"{least[:40]} repetitions are too many")
    if len(most.lstrip("0")) > _MOST_DIGITS:
        most = ""
    return f"{{{int(least)}{comma}{most and int(most)}}}"


def _set(text: str) -> str:
    """A set of characters as a regular expression: `a-z`, or `^a-z` for all others."""
    characters = _characters(text.removeprefix("^"))
    parts = ["^\\x{0}"] if text.startswith("^") else []
    at = 0
    while at < len(characters):
        parts.append(_code(characters[at][0]))
        if at + 2 < len(characters) and characters[at + 1] == ("-", False):
            parts.append(f"-{_code(characters[at + 2][0])}")
            at += 2
        at += 1
    return f"[{''.join(parts)}]"


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters of a literal or a set, and whether each is written as an escape."""
    found = []
    at = 0
    while at < len(text):
        match = _CHARACTER.match(text, at)
        if match is None:
            raise _invalid(f"unknown escape {text[at : at + 2]!r}")
        at = match.end()
        if match[5] is not None:
            found.append((match[5], False))
        elif match[4] is not None:
            found.append((_ESCAPED.get(match[4], match[4]), True))
        else:
            code = int(match[1] or match[2] or match[3], 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise _invalid(f"{match[0]} is not a character")
            found.append((chr(code), True))
    return found


def _code(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _invalid(why: str, hint: str = "see grammars/README.md of llama.cpp") -> RequestRefused:
    return RequestRefused(f"the grammar is not valid GBNF: {why}", hint=hint)
