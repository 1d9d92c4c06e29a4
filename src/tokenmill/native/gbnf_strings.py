"""Characters of JSON strings in a grammar: raw, escaped, inside and outside of sets of names.

Half of a surrogate pair cannot be written: neither raw nor as an escape.
"""

from collections.abc import Iterable

from tokenmill.native.gbnf import NEVER, Chars, Lit, Node, Ranges, Rules, alt, seq

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_LONGEST_NAME = 200  # a rule for each of its characters
_DEEPEST = 40
QUOTE = Lit('"')


def union(sets: Iterable[Ranges]) -> Ranges:
    """Code points in any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in sets for one in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Code points in both sets."""
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return union([tuple(pair for pair in both if pair[0] <= pair[1])])


def without(ranges: Ranges) -> Ranges:
    """All code points but these."""
    found = []
    begin = 0
    for first, last in union([ranges]):
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return common((*found, (begin, 0x10FFFF)) if begin <= 0x10FFFF else tuple(found), ALL)


def any_char(rules: Rules) -> Node:
    """One character of a string, written in any way JSON has."""
    hexa = Chars(((48, 57), (65, 70), (97, 102)))
    two = seq(hexa, hexa)
    d = Chars(((68, 68), (100, 100)))
    pair = seq(d, _of("89abAB"), two, Lit("\\u"), d, _of("cdefCDEF"), two)
    unit = alt((seq(_of("0123456789abcefABCEF"), hexa, two), seq(d, _of("01234567"), two), pair))
    return rules.add("char", alt((Chars(_RAW), seq(Lit("\\"), alt((_of('"\\/bfnrt'), seq(Lit("u"), unit)))))))


def encoded(rules: Rules, ranges: Ranges) -> Node:
    """One character of a set, each written in one way: raw where JSON allows it."""
    raw = common(ranges, _RAW)
    held = [point for first, last in ranges for point in range(first, min(last, 0x5C) + 1) if point in _SHORT]
    long = [point for first, last in ranges for point in range(first, min(last, 0x1F) + 1) if point not in _SHORT]
    choices: list[Node] = [Chars(raw)] if raw else []
    if held:
        choices.append(seq(Lit("\\"), _of("".join(_SHORT[point] for point in held))))
    for high in (0, 1):
        last_digits = [f"{point:x}"[-1] for point in long if point >> 4 == high]
        if last_digits:
            choices.append(seq(Lit(f"\\u00{high}"), _of("".join(last_digits))))
    return alt(choices) if len(choices) < 2 else rules.add("one", alt(choices))


def _of(chars: str) -> Node:
    return Chars(union([tuple((ord(char), ord(char)) for char in chars)]))


def one_of(rules: Rules, texts: Iterable[str], *, depth: int = 0) -> Node:
    """One of some texts; common beginnings are followed once, for each choice costs llama.cpp time."""
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(text[:1], []).append(text)
    choices: list[Node] = []
    for members in groups.values():
        if len(members) == 1 or depth >= _DEEPEST:
            choices += map(Lit, members)
            continue
        same = _same_beginning(members)
        rest = rules.add("word", one_of(rules, (text[same:] for text in members), depth=depth + 1))
        choices.append(seq(Lit(members[0][:same]), rest))
    return alt(choices)


def _same_beginning(texts: list[str]) -> int:
    first = min(texts)
    last = max(texts)
    return next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def none_of(rules: Rules, names: Iterable[str]) -> Node:
    """A string, with its quotes, that is none of some names."""
    wanted = frozenset(names)
    if not wanted:
        return rules.add("string", seq(QUOTE, rules.repeat(any_char(rules), 0, None), QUOTE))
    if max(map(len, wanted)) > _LONGEST_NAME:
        raise ValueError(f"a name of more than {_LONGEST_NAME} characters")
    any_rest = rules.add("other", seq(rules.repeat(encoded(rules, ALL), 0, None), QUOTE))
    return rules.add("name", seq(QUOTE, _not(rules, wanted, any_rest)))


def _not(rules: Rules, names: frozenset[str], any_rest: Node) -> Node:
    after: dict[str, set[str]] = {}
    for name in names:
        if name:
            after.setdefault(name[0], set()).add(name[1:])
    firsts: Ranges = tuple((ord(char), ord(char)) for char in sorted(after))
    choices: list[Node] = [NEVER if "" in names else QUOTE, seq(encoded(rules, without(firsts)), any_rest)]
    for char, rest in sorted(after.items()):
        point = ord(char)
        choices.append(seq(encoded(rules, ((point, point),)), _not(rules, frozenset(rest), any_rest)))
    return rules.add("not", alt(choices))


def string(rules: Rules, least: int, most: int | None) -> Node:
    """A string of so many characters."""
    inner = rules.repeat(any_char(rules), least, most)
    return NEVER if inner == NEVER else rules.add("string", seq(QUOTE, inner, QUOTE))
