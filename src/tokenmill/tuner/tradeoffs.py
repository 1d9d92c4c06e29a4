"""What an operating point costs, in sentences with figures: what would have been better otherwise, and by how much."""

from collections.abc import Iterator, Sequence

from tokenmill.tuner.aims import Yardstick, cores
from tokenmill.tuner.noise import Standing
from tokenmill.tuner.point import TrialSettings

HALF = 0.5  # of the throughput: what costs more than that is no alternative
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
FIRST = "first token after {:.2g} s instead of {:.2g}"
ENERGY = "{:.2g} J a token instead of {:.2g}"
_DIALS = {
    "threads": "{} threads",
    "sequences": "{} sequences",
    "ubatch": "ubatch {}",
    "context": "context {}",
    "cache_type_k": "{} cache",
    "flash_attention": "flash attention {}",
    "mmap": "mmap {}",
    "repack": "repack {}",
    "offload_min_batch": "offload from {} rows",
    "placement": "placement {}",
}


def given_up(
    yard: Yardstick, chosen: Standing, front: Sequence[Standing], found: Sequence[Standing], noise: float
) -> tuple[str, ...]:
    """What the aim could not have, then the throughput that was left, then what others on the front have more of."""
    rates = {each.dials: rate for each in found if (rate := yard.tok_s(each.figures)) is not None}
    sentences = [*_unmet(yard, chosen)]
    own = rates.get(chosen.dials)
    if own is None:
        return tuple(sentences)
    fastest = max((each for each in found if each.dials in rates), key=lambda each: rates[each.dials])
    most = rates[fastest.dials]
    gains = "".join(f", {gain}" for gain in _gains(chosen, fastest, noise))
    if most > own and (gains or own < most * (1 - noise)):
        sentences.append(f"{instead(chosen.dials, fastest.dials)}: {_percent(1 - own / most)} less{gains}")
    told = {chosen.dials, fastest.dials}
    others = [each for each in front if each.dials not in told and rates.get(each.dials, 0.0) >= HALF * own]
    for other in _leaders(yard, chosen, others):
        gains = ", ".join(_gains(other, chosen, noise))
        there = rates[other.dials]
        price = f", for {_percent(1 - there / own)} less throughput" if there < own else ""
        if gains and other.dials not in told:
            told.add(other.dials)
            sentences.append(f"{instead(other.dials, chosen.dials)} would give {gains}{price}")
    return tuple(sentences)


def _unmet(yard: Yardstick, chosen: Standing) -> Iterator[str]:
    aim = yard.aim
    if aim.kind == "latency" and not yard.in_time(chosen.figures):
        yield f"nothing that was tried has its first token within {aim.first_token_s:g} s: this is the soonest"
    if aim.kind == "latency" and yard.by == "throughput":
        yield "first tokens were not measured: chosen by throughput alone"
    if aim.kind == "energy" and yard.by == "throughput":
        yield "energy was not measured: chosen by throughput alone"


def _leaders(yard: Yardstick, chosen: Standing, others: Sequence[Standing]) -> Iterator[Standing]:
    """The best of the others in each respect but throughput, the faster one of equals."""

    def rate(each: Standing) -> float:
        return yard.tok_s(each.figures) or 0.0

    for name in ("first_token_s", "joules_per_token"):
        timed = [each for each in others if getattr(each.figures, name) is not None]
        if timed and getattr(chosen.figures, name) is not None:
            yield min(timed, key=lambda each: (getattr(each.figures, name), -rate(each)))
    if others:
        yield min(others, key=lambda each: (cores(each.dials), -rate(each)))
    roomier = [each for each in others if each.dials.context > chosen.dials.context]
    if roomier:
        yield max(roomier, key=lambda each: (each.dials.context, rate(each)))


def _gains(one: Standing, other: Standing, noise: float) -> Iterator[str]:
    """What one has that the other does not, throughput aside."""
    free = cores(other.dials) - cores(one.dials)
    if free > 0:
        number = NUMBERS[free] if free < len(NUMBERS) else str(free)
        yield f"{number} core{'' if free == 1 else 's'} free"
    if one.dials.context > other.dials.context:
        yield f"room for {one.dials.context} tokens instead of {other.dials.context}"
    for name, words in (("first_token_s", FIRST), ("joules_per_token", ENERGY)):
        mine = getattr(one.figures, name)
        theirs = getattr(other.figures, name)
        if mine is not None and theirs is not None and mine < theirs * (1 - noise):
            yield words.format(mine, theirs)


def instead(dials: TrialSettings, other: TrialSettings) -> str:
    """`13 threads and 8 sequences instead of 16 and 12`: what differs."""
    mine = []
    theirs = []
    for name, words in _DIALS.items():
        one = getattr(dials, name)
        two = getattr(other, name)
        if one != two:
            mine.append(words.format(_value(one)))
            theirs.append(_value(two))
    if not mine:
        return f"{dials.threads_batch} threads for prefill instead of {other.threads_batch}"
    return f"{_joined(mine)} instead of {_joined(theirs)}"


def _value(value: object) -> str:
    if value is None:
        return "the engine's own"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _percent(share: float) -> str:
    return "less than 1 %" if share < 0.01 else f"{share * 100:.0f} %"
