"""Decimal numbers within bounds, digit by digit: [3, 17] is [3-9] | "1" [0-7].

A number that has a bound is written without an exponent. Where a bound is missing, LONGEST digits are one.
"""

from decimal import Decimal

from tokenmill.native.gbnf import EMPTY, NEVER, Chars, Lit, Node, Rep, alt, seq

LONGEST = 20  # digits before the point: unsigned 64 bits
DECIMALS = 16  # digits after those of a bound
MOST_DIGITS = 60  # of a bound
DIGIT = Chars(((48, 57),))
_SOME = Rep(DIGIT, 0, DECIMALS)


def any_integer() -> Node:
    """An integer without bounds."""
    return alt((Lit("0"), seq(Rep(Lit("-"), 0, 1), Chars(((49, 57),)), Rep(DIGIT, 0, LONGEST - 1))))


def any_number() -> Node:
    """A number without bounds, small enough for a double."""
    whole = alt((Lit("0"), seq(Chars(((49, 57),)), Rep(DIGIT, 0, LONGEST - 1))))
    fraction = seq(Lit("."), Rep(DIGIT, 1, DECIMALS))
    exponent = seq(Chars(((69, 69), (101, 101))), Rep(Chars(((43, 43), (45, 45))), 0, 1), Rep(DIGIT, 1, 2))
    return seq(Rep(Lit("-"), 0, 1), whole, Rep(fraction, 0, 1), Rep(exponent, 0, 1))


def integers(least: int | None, most: int | None) -> Node:
    """Every integer from `least` to `most`."""
    if least is None and most is None:
        return any_integer()
    edge = 10 ** max(LONGEST, *(len(str(abs(bound))) for bound in (least, most) if bound is not None)) - 1
    low = -edge if least is None else least
    high = edge if most is None else most
    if low > high:
        return NEVER
    negative = seq(Lit("-"), _naturals(max(1, -high), -low)) if low < 0 else NEVER
    return alt((_naturals(max(0, low), high), negative)) if high >= 0 else negative


def _naturals(low: int, high: int) -> Node:
    choices: list[Node] = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        choices.append(_between(str(low), str(last)))
        low = last + 1
    return alt(choices)


def _between(low: str, high: str) -> Node:
    """Digits of one length."""
    rest = len(low) - 1
    if rest < 0:
        return EMPTY
    first = int(low[0])
    last = int(high[0])
    if first == last:
        return seq(Lit(low[0]), _between(low[1:], high[1:]))
    choices: list[Node] = []
    if low[1:] != "0" * rest:
        choices.append(seq(Lit(low[0]), _between(low[1:], "9" * rest)))
        first += 1
    top: Node = NEVER
    if high[1:] != "9" * rest:
        top = seq(Lit(high[0]), _between("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        choices.append(seq(_digits(first, last), Rep(DIGIT, rest, rest) if rest else EMPTY))
    return alt([*choices, top])


def _digits(first: int, last: int) -> Node:
    return Lit(str(first)) if first == last else Chars(((48 + first, 48 + last),))


def numbers(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> Node:
    """Every number from `low` to `high`; without `low` itself if `above`, without `high` if `below`."""
    if low is None and high is None:
        return any_number()
    edge = Decimal(10 ** max(LONGEST, *(bound.adjusted() + 2 for bound in (low, high) if bound is not None)) - 1)
    low, above = (-edge, False) if low is None else (low, above)
    high, below = (edge, False) if high is None else (high, below)
    choices: list[Node] = []
    if high >= 0:
        choices.append(_positive(max(low, Decimal(0)), high, above and low >= 0, below))
    if low < 0:
        begin = max(-high, Decimal(0))
        choices.append(seq(Lit("-"), _positive(begin, -low, begin == 0 or below, above)))
    return alt(choices)


def _positive(low: Decimal, high: Decimal, above: bool, below: bool) -> Node:
    if low > high or (low == high and (above or below)):
        return NEVER
    (whole, part), (last, last_part) = _halves(low), _halves(high)
    if whole == last:
        return seq(Lit(str(whole)), _fraction(part, last_part, above, below))
    return alt(
        (
            seq(Lit(str(whole)), _fraction(part, None, above, False)),
            seq(_naturals(whole + 1, last - 1), _fraction("", None, False, False)),
            seq(Lit(str(last)), _fraction("", last_part, False, below)),
        )
    )


def _halves(value: Decimal) -> tuple[int, str]:
    whole, _, part = f"{value:f}".partition(".")
    return int(whole), part.rstrip("0")


def _fraction(low: str, high: str | None, above: bool, below: bool) -> Node:
    """A point and digits from 0.low to 0.high (None: no bound), or nothing where the bounds allow it."""
    nothing = low == "" and not above and not (high == "" and below)
    digits = _after(low, high, above, below, first=True)
    return alt((EMPTY if nothing else NEVER, seq(Lit("."), digits)))


def _after(low: str | None, high: str | None, above: bool, below: bool, *, first: bool = False) -> Node:
    """Digits after a point: `low` and `high` are what is left of the bounds, None where one no longer binds."""
    if low is None and high is None:
        return Rep(DIGIT, 1, DECIMALS) if first else _SOME
    if low == "" and not above:
        return _after(None, high, above, below, first=first)
    if low is None and high == "":
        return NEVER if below else Rep(Lit("0"), 1 if first else 0, DECIMALS)
    if low == "" and high is None:
        return seq(Rep(Lit("0"), 0, DECIMALS), Chars(((49, 57),)), _SOME)
    if low == "" and high == "":
        return NEVER
    end = not first and low is None and (high != "" or not below)
    start = 0 if low is None else int(low[:1] or 0)
    stop = 9 if high is None else int(high[:1] or 0)
    choices: list[Node] = [EMPTY if end else NEVER]
    for digit in sorted({start, stop}):
        if start <= digit <= stop:
            next_low = low[1:] if low is not None and digit == start else None
            next_high = high[1:] if high is not None and digit == stop else None
            choices.append(seq(Lit(str(digit)), _after(next_low, next_high, above, below)))
    if stop - start > 1:
        choices.append(seq(_digits(start + 1, stop - 1), _SOME))
    return alt(choices)
