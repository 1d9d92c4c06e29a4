"""Finds what a damaged model forgets in C-like code: closing quotes, brackets, and semicolons. Pure; no compiler.

A reader of tokens, not a parser: it knows strings, comments, brackets, and where a statement must have ended. It is
meant to be silent about sound code, and so misses some faults: whether code means anything it cannot tell.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

_OPENS = {"(": ")", "[": "]", "{": "}"}
_CLOSES = frozenset(_OPENS.values())
_HEADS = frozenset({"if", "for", "while", "switch", "catch", "synchronized", "foreach", "with"})  # before a bracket
_ENDING = frozenset({"return", "break", "continue"})  # keywords that a semicolon may follow
# words after which a statement cannot be over
_NEVER_ENDS = frozenset(
    {
        "if",
        "else",
        "for",
        "while",
        "do",
        "switch",
        "case",
        "default",
        "goto",
        "const",
        "static",
        "struct",
        "union",
        "enum",
        "class",
        "public",
        "private",
        "protected",
        "final",
        "unsigned",
        "signed",
        "inline",
        "extern",
        "typedef",
        "new",
        "throw",
        "throws",
        "try",
        "catch",
        "finally",
        "import",
        "package",
        "using",
    }
)
_BODIES = frozenset({"else", "do", "try", "finally"})  # words before a block
_TYPES = frozenset({"class", "struct", "union", "interface", "namespace", "extern", "throws"})
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+)|(?P<line>\n)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<open_comment>/\*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<quote>["'])
    |(?P<word>[A-Za-z_$][\w$]*)|(?P<number>\.?\d[\w.]*)|(?P<sign>\+\+|--|->|=>|::|.)""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_TEMPLATE = re.compile(r"`(?:\\.|[^`\\])*`", re.DOTALL)
TokenKind = Literal["word", "number", "text", "sign"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    line: int  # from 1
    words: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.words}"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: TokenKind
    text: str
    line: int


@dataclass(slots=True)
class _Open:
    """A bracket that is open."""

    token: _Token
    block: bool = False  # of statements; else of values
    body: bool = False  # of a function, or inside one
    head: bool = False  # a round bracket after `if` and the like: no semicolon after it


@dataclass(slots=True)
class _Reader:
    """Where a reading stands."""

    semicolons: bool
    open: list[_Open] = field(default_factory=list)
    last: _Token | None = None
    closed: _Open | None = None  # by the last token
    statement: list[str] = field(default_factory=list)  # tokens since the last statement began
    faults: list[Fault] = field(default_factory=list)


def faults_in(text: str, *, semicolons: bool = True) -> tuple[Fault, ...]:
    """What is missing in a piece of code; `semicolons`: the language ends statements with them."""
    reader = _Reader(semicolons)
    for token in _tokens(_blanked(text), reader.faults):
        _take(reader, token)
    for left in reader.open:
        reader.faults.append(Fault(left.token.line, f"{left.token.text!r} is never closed"))
    return tuple(sorted(reader.faults, key=lambda fault: fault.line))


def _blanked(text: str) -> str:
    """Directives of the preprocessor and texts between backticks are not looked into; lines keep their numbers."""

    def lines(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    return _TEMPLATE.sub(lambda found: '""' + lines(found), _DIRECTIVE.sub(lines, text))


def _tokens(text: str, faults: list[Fault]) -> Iterator[_Token]:
    line = 1
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            break
        kind = found.lastgroup
        word = found[0]
        at = found.end()
        if kind == "quote":
            name = "double quote" if word == '"' else "single quote"
            faults.append(Fault(line, f"a {name} is not closed"))
            end = text.find("\n", at)
            rest = text[at : end if end >= 0 else None]
            at = end if end >= 0 else len(text)
            yield _Token("text", word, line)
            yield from _tail(rest, line)
        elif kind == "open_comment":
            faults.append(Fault(line, "a comment is not closed"))
            return
        elif kind in ("word", "number", "text", "sign"):
            yield _Token(kind, word, line)  # type: ignore[arg-type]
        line += word.count("\n")


def _tail(rest: str, line: int) -> Iterator[_Token]:
    """The brackets and the semicolon at the end of a line whose text is not closed: likely not part of it."""
    end = re.search(r"[)\]};,]*[ \t\r]*$", rest)
    for sign in end[0].strip() if end else "":
        yield _Token("sign", sign, line)


def _take(reader: _Reader, token: _Token) -> None:
    if reader.semicolons and _must_have_ended(reader, token):
        last = reader.last
        assert last is not None  # noqa: S101  something came before what must have ended
        reader.faults.append(Fault(last.line, f"no semicolon after {_shown(last)}"))
        reader.statement.clear()
    closed = None
    if token.text in _OPENS and token.kind == "sign":
        reader.open.append(_opened(reader, token))
    elif token.text in _CLOSES and token.kind == "sign":
        closed = _close(reader, token)
    over = token.text in (";", "{") or (token.text == "}" and (closed is None or closed.block))
    if token.kind == "sign" and over and _in_block(reader):
        reader.statement.clear()
    else:
        reader.statement.append(token.text)
    reader.last = token
    reader.closed = closed


def _opened(reader: _Reader, token: _Token) -> _Open:
    last = reader.last
    before = last.text if last is not None else ""
    if token.text == "(":
        return _Open(token, head=before in _HEADS)
    if token.text == "[":
        return _Open(token)
    # values after an assignment, inside other values, in a call, and of an enumeration; statements else
    values = bool(
        before in ("=", ",", "(", "[", "]")
        or reader.statement[:1] == ["return"]
        or (before == ":" and not _in_block(reader))
        or (before == "{" and not _in_block(reader))
        or (reader.open and reader.open[-1].token.text != "{" and before != ")")  # else it is a lambda's
        or "enum" in reader.statement
        or "new" in reader.statement[-4:]
        or (
            last is not None
            and last.kind == "word"
            and before not in _BODIES
            and _in_function(reader)
            and not _TYPES & set(reader.statement)
        )
    )
    body = ")" in reader.statement or any(one.body for one in reader.open)
    return _Open(token, block=not values, body=body)


def _close(reader: _Reader, token: _Token) -> _Open | None:
    """Close a bracket; the one that it was, if any."""
    if reader.open and _OPENS[reader.open[-1].token.text] == token.text:
        return reader.open.pop()
    # one bracket was forgotten: which one shows by what is open further out
    inner = next(
        (at for at in range(len(reader.open) - 1, -1, -1) if _OPENS[reader.open[at].token.text] == token.text), None
    )
    if inner is None:
        reader.faults.append(Fault(token.line, f"{token.text!r} closes nothing"))
        return None
    for left in reader.open[inner + 1 :]:
        reader.faults.append(Fault(left.token.line, f"{left.token.text!r} is not closed before {token.text!r}"))
    found = reader.open[inner]
    del reader.open[inner:]
    return found


def _in_block(reader: _Reader) -> bool:
    return not reader.open or reader.open[-1].block


def _in_function(reader: _Reader) -> bool:
    """Whether the block is that of a function, or inside one: round brackets came before it."""
    return bool(reader.open) and reader.open[-1].body


def _must_have_ended(reader: _Reader, token: _Token) -> bool:
    """Whether a statement was over before this token, and no semicolon said so."""
    last = reader.last
    if last is None or not reader.open or not reader.open[-1].block or not reader.statement:
        return False
    closed = reader.closed
    if closed is not None and (closed.head or closed.block):
        return False
    if closed is None and not _ends_statement(last):
        return False
    if token.kind == "sign" and token.text == "}":
        return True
    if token.line == last.line:
        return False
    begins = token.kind in ("word", "number") or token.text in ("++", "--")
    # a class's methods: annotations and modifiers stand on lines of their own, heads of methods are followed by `{`
    return begins and not _is_modifier(reader) and token.text not in ("instanceof", "throws", "extends", "implements")


def _ends_statement(token: _Token) -> bool:
    if token.kind == "word":
        return token.text in _ENDING or token.text not in _NEVER_ENDS
    return token.kind in ("number", "text") or token.text in ("++", "--")


def _is_modifier(reader: _Reader) -> bool:
    """`@Override` and the like on a line of their own."""
    return "@" in reader.statement[:1]


def _shown(token: _Token) -> str:
    return f"{token.text[:40]!r}" if token.kind != "text" else token.text[:40]
