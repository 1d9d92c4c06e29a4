"""Finds variable text, which differs between jobs without changing the task: timestamps, ids, numbers, whitespace.

`marked` splits a text at such places. Replacing some of them by placeholders shows whether texts would be equal without
them. Pure.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from tokenmill.jobs.scheduler.prefix_groups import common_length

Volatile = Literal["timestamp", "id", "number", "whitespace"]
VOLATILE: tuple[Volatile, ...] = ("timestamp", "id", "number", "whitespace")
SIGNS: dict[Volatile, str] = {"timestamp": "\0t", "id": "\0i", "number": "\0n", "whitespace": " "}  # or a line feed

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIME = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    r"(?: ?(?:Z|UTC|GMT|[A-Z]{3,4})\b| ?[+-]\d{2}:?\d{2}\b)*"
)
_NTH = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = "|".join(
    (
        r"\d{4}-\d{2}-\d{2}",  # 2026-01-03
        r"\d{4}[/.]\d{1,2}[/.]\d{1,2}",  # 2026/1/3
        r"\d{1,2}[/.-]\d{1,2}[/.-]\d{4}",  # 3.1.2026
        r"\d{1,2}/\d{1,2}/\d{2}",  # 1/3/26
        rf"(?:{_DAY},? +)?{_NTH}(?: of)?[ -]+{_MONTH}\.?,?[ -]+\d{{2,4}}",  # Sat, 03 Jan 2026; 3-Jan-26
        rf"(?:{_DAY},? +)?{_MONTH}\.? +{_NTH}\b(?:,? +\d{{4}}\b(?!:))?",  # January 3rd, 2026; Sat Jan  3
        rf"{_MONTH},? +\d{{4}}",
        r"\d{4}年\d{1,2}月(?:\d{1,2}日)?(?: ?[(（][月火水木金土日][)）])?",
        r"\d{4}년 ?\d{1,2}월(?: ?\d{1,2}일)?",
    )
)
_CJK_TIME = r"\d{1,2}[時时点](?:\d{1,2}分(?:\d{1,2}秒)?)?"
_COMPACT = r"20\d{2}(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])(?:[T_-]?[0-2]\d[0-5]\d(?:[0-5]\d(?:\.?\d{3,6})?)?Z?)?"
_UNIX = r"1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?"  # 2017 to 2033, in s, ms, us or ns
_TIMESTAMP = (
    rf"(?:{_DATE})(?:(?:T|_|,? *(?:at |- )?)(?:{_TIME}|{_CJK_TIME}))?(?: \d{{4}}\b)?|{_TIME}|{_COMPACT}|{_UNIX}"
)

_PREFIXES = (
    "request|req|run|job|session|sess|trace|span|chatcmpl|cmpl|message|msg|call|nonce|txn|task|thread|batch|conv|corr"
    "|id"
)
_ID = "|".join(
    (
        r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",  # UUID
        r"0x[0-9a-fA-F]{4,}",  # an object's address, which repr() prints
        rf"(?:{_PREFIXES})(?:_|-)(?=[A-Za-z]*\d)[A-Za-z0-9]{{4,}}",  # req_8f3a
        r"(?=[0-9a-f]*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}",  # hash
        r"(?=[0-9A-F]*[A-F])(?=[A-F]*\d)[0-9A-F]{8,}",
        r"[0-7][0-9A-HJKMNP-TV-Z]{25}",  # ULID
        r"(?=[A-Za-z_-]*\d)(?=[^A-Z\s]*[A-Z])(?=[^a-z\s]*[a-z])[A-Za-z0-9_-]{16,}",  # random, base64
    )
)
_MARK = re.compile(rf"(?:(?P<id>{_ID})|(?:{_TIMESTAMP}))(?![A-Za-z0-9])", re.ASCII)  # 4:05 PM ends before です
_DIGITS = re.compile("[0-9]+")
_BLANKS = re.compile(r"\s+")
# Every mark contains one of these. Trying all patterns everywhere is fifty times slower, and \s alone three times.
_HINT = re.compile("[0-9\t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]|  ")
_NAMES = frozenset(
    (
        "Mon",
        "Tue",
        "Wed",
        "Thu",
        "Fri",
        "Sat",
        "Sun",
        "Jan",
        "Feb",
        "Mar",
        "Apr",
        "May",
        "Jun",
        "Jul",
        "Aug",
        "Sep",
        "Oct",
        "Nov",
        "Dec",
    )
)
_NUMERALS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") | _NUMERALS
_WORD = _LETTERS | {"_", "-"}
_MAX_WORD = 64
_QUIET = frozenset(("", ",", ";", ")", "]", "}", "%", "*", "|", "`", '"', "'", "\n", "\t", "\r"))
_LONG_LINE = 600
_LONG_SEGMENT = 4000
_LINE_ENDS = re.compile(r"[ \t]*\r?\n|\r")


class VariableSpot(NamedTuple):
    """A piece of variable text."""

    kind: Volatile
    text: str

    @property
    def sign(self) -> str:
        """Its placeholder; line breaks are kept."""
        return "\n" if self.kind == "whitespace" and ("\n" in self.text or "\r" in self.text) else SIGNS[self.kind]


class Marked(NamedTuple):
    """A text split at its marks: the plain texts around them, one more than there are marks."""

    plain: list[str]
    marks: list[VariableSpot]

    def spelled(self, keep: Volatile | None = None, *, ends: bool = True) -> str:
        """The text with placeholders for all marks except those of one kind; `ends` strips whitespace at both ends."""
        parts = [self.plain[0]]
        for mark, plain in zip(self.marks, self.plain[1:], strict=True):
            parts.append(mark.text if mark.kind == keep else mark.sign)
            parts.append(plain)
        text = "".join(parts)
        return text if keep == "whitespace" or not ends else text.strip(" \n")

    def kinds(self) -> set[Volatile]:
        """The kinds of its marks."""
        return {mark.kind for mark in self.marks}


class Segment(NamedTuple):
    """A section of a text at whose ends no mark continues, with its marks and spellings."""

    text: str
    marked: Marked
    spelled: dict[Volatile | None, str]  # by the kind that is not replaced; None: all are replaced


def marked(text: str) -> Marked:
    """Split a text at all variable text."""
    plain = list[str]()
    marks = list[VariableSpot]()
    end = 0
    while hint := _HINT.search(text, end):
        at = hint.start()
        mark, start, stop = _number(text, end, at) if text[at] in _NUMERALS else _blanks(text, end, at)
        plain.append(text[end:start])
        marks.append(mark)
        end = stop
    plain.append(text[end:])
    return Marked(plain, marks)


def _number(text: str, least: int, at: int) -> tuple[VariableSpot, int, int]:
    """The mark around a digit: the first that starts at a day or month before it, at its word, or at the digit."""
    word = at
    floor = max(least, at - _MAX_WORD)
    while word > floor and text[word - 1] in _WORD:
        word -= 1
    while text[word] in "_-":
        word += 1
    digits = _DIGITS.match(text, at)
    assert digits is not None  # noqa: S101  the hint was a digit
    names = _names_before(text, floor, word)
    if word == at and not names and _plainly_ends(text, at, digits.end()):
        return VariableSpot("number", digits[0]), at, digits.end()
    for start in (*names, word) if word == at else (*names, word, at):
        match = _MARK.match(text, start)
        if match and match.end() > at and not (start and text[start - 1] in _LETTERS):
            kind: Volatile = "id" if match["id"] else "timestamp"
            return VariableSpot(kind, match[0]), start, match.end()
    return VariableSpot("number", digits[0]), at, digits.end()


def _plainly_ends(text: str, start: int, end: int) -> bool:
    """Whether a short number is certainly not part of a date or an id, so that no pattern needs to be tried."""
    if end - start > 7:
        return False
    following = text[end : end + 5]
    if following[:1] == " ":
        return following[1:4] not in _NAMES and not following.startswith(" of ")
    return following[:1] in _QUIET


def _names_before(text: str, floor: int, word: int) -> list[int]:
    """Start positions of days and months that precede a word, in order."""
    starts: list[int] = []
    while len(starts) < 2 and word > floor and text[word - 1] == " ":
        stop = word
        while stop > floor and text[stop - 1] in " ,.":
            stop -= 1
        start = stop
        while start > floor and text[start - 1] in _WORD:
            start -= 1
        if text[start : start + 3] not in _NAMES:
            break
        starts.insert(0, start)
        word = start
    return starts


def _blanks(text: str, least: int, at: int) -> tuple[VariableSpot, int, int]:
    while at > least and text[at - 1] == " ":
        at -= 1
    match = _BLANKS.match(text, at)
    assert match is not None  # noqa: S101  the hint was a blank
    stop = match.end()
    if match[0] == "  " and text[stop : stop + 1] in _NUMERALS and _names_before(text, least, stop):
        return _number(text, least, stop)  # Sat Jan  3: a day of one digit, in a column for two
    return VariableSpot("whitespace", match[0]), at, stop


def segments(text: str) -> list[Segment]:
    """Split a text into segments, which are cached because similar texts share most of them."""
    return [_segment(section) if len(section) <= _LONG_SEGMENT else segment(section) for section in _sections(text)]


@lru_cache(20_000)
def _segment(text: str) -> Segment:
    return segment(text)


def segment(text: str) -> Segment:
    """A text as a segment, with its marks and spellings."""
    cut = marked(text)
    kinds: set[Volatile | None] = {None, *cut.kinds()}
    return Segment(text, cut, {kind: cut.spelled(kind, ends=False) for kind in kinds})


def spelled(text: Sequence[Segment], keep: Volatile | None = None) -> str:
    """The text of segments with placeholders for all marks except those of one kind."""
    whole = "".join([segment.spelled.get(keep) or segment.spelled[None] for segment in text])
    return whole if keep == "whitespace" else whole.strip(" \n")


def _sections(text: str) -> Iterator[str]:
    """Yield lines, each with the indentation of the next one; long lines by sentence."""
    first, *lines = text.split("\n")
    held = first
    for line in lines:
        rest = line.lstrip()
        held += "\n" + line[: len(line) - len(rest)]
        if rest:
            yield from (held,) if len(held) <= _LONG_LINE else _sentences(held)
            held = rest
    yield from (held,) if len(held) <= _LONG_LINE else _sentences(held)


def _sentences(line: str) -> Iterator[str]:
    held = ""
    for sentence in line.split(". "):
        if held and sentence[:1].isupper():
            yield held
            held = ""
        held += sentence + ". "
    yield held[:-2]


def differing_marks(one: Marked, other: Marked) -> Iterator[tuple[Volatile, int, int]]:
    """Differences of two texts that are equal without their marks: kind, and position in each text in characters.

    Marks are matched by the positions of their placeholders. A single space is not a mark, but may match two spaces.
    """
    ours, here = _by_sign(one)  # the second value is the offset between the text and the one with placeholders
    theirs, there = _by_sign(other)
    for at in sorted(ours.keys() | theirs.keys()):
        kind = (ours.get(at) or theirs[at]).kind
        left, right = (found[at].text if at in found else SIGNS[kind] for found in (ours, theirs))
        if left != right:
            same = common_length(left, right) if kind == "whitespace" else 0
            yield kind, at + here + same, at + there + same
        here += len(left) - len(SIGNS[kind])
        there += len(right) - len(SIGNS[kind])


def differing(one: Sequence[Segment], other: Sequence[Segment]) -> Iterator[tuple[Volatile, int, int]]:
    """Like `differing_marks`, for texts in segments, most of which are equal."""
    if len(one) != len(other) or any(a.spelled[None] != b.spelled[None] for a, b in zip(one, other, strict=True)):
        yield from differing_marks(_joined(one), _joined(other))
        return
    here = there = 0
    for ours, theirs in zip(one, other, strict=True):
        if ours is not theirs:
            for kind, at, other_at in differing_marks(ours.marked, theirs.marked):
                yield kind, here + at, there + other_at
        here += len(ours.text)
        there += len(theirs.text)


def _joined(text: Sequence[Segment]) -> Marked:
    plain = [""]
    marks = list[VariableSpot]()
    for segment in text:
        plain[-1] += segment.marked.plain[0]
        plain += segment.marked.plain[1:]
        marks += segment.marked.marks
    return Marked(plain, marks)


def _by_sign(text: Marked) -> tuple[dict[int, VariableSpot], int]:
    """Marks by the position of their placeholders in the stripped text, and the number of leading spaces."""
    found: dict[int, VariableSpot] = {}
    first = text.plain[0]
    lead = len(first) - len(first.lstrip(" "))
    at = -lead
    for plain, mark in zip(text.plain, text.marks, strict=False):
        at += len(plain)
        if at == 0 and mark.kind == "whitespace":
            lead += len(mark.text)
        else:
            found[at] = mark
            at += len(SIGNS[mark.kind])
    return found, lead


def line_ends_unified(text: str) -> str:
    """Replace all line endings by line feeds, and remove trailing whitespace from lines and from the text."""
    return _LINE_ENDS.sub("\n", text).rstrip(" \t\n")
