"""Joules for a token, and what a million of them cost at a price of electricity.

Counters and wall meters see the whole machine, idle power included; the cost is that of energy alone, not of the
machine. Prefill and decode differ by an order of magnitude, so each is measured apart.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from tokenmill.errors import UsageError
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import Stat, stat
from tokenmill.tuner.bench.served import Served, Units
from tokenmill.tuner.energy import Joules, Meter

_KWH_J = 3.6e6
_PRICE = re.compile(
    r"\s*([^\d\s.,/+-]{0,4})\s*(\d+(?:[.,]\d+)?)\s*([^\d\s.,/+-]{0,4})\s*(?:/\s*kwh)?\s*", re.IGNORECASE
)


class Measures(Protocol):
    """Joules between two moments."""

    def start(self) -> None:
        """Measure from here on."""

    def stop(self) -> Joules:
        """What was used since."""


@dataclass(frozen=True, slots=True)
class Price:
    """Of a kilowatt-hour."""

    per_kwh: float
    currency: str = ""

    def of_million(self, joules_per_token: float) -> float:
        """A million tokens at so many joules each."""
        return joules_per_token * 1e6 / _KWH_J * self.per_kwh


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules for a token; None: not known, and `why_not` says why."""

    decode_j: Stat | None = None  # for one written
    prefill_j: Stat | None = None  # for one of a prompt
    source: str | None = None  # counters, or a wall meter's figure
    why_not: str | None = None


def parse_price(text: str) -> Price:
    """`0.30`, `0.30/kWh`, `0,30 EUR/kWh`, `$0.12`."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not a price of electricity", hint="for example --price 0.30/kWh", code="invalid_price"
        )
    return Price(float(match[2].replace(",", ".")), match[1] or match[3])


async def energy(
    rig: Rig, *, prompt: int, tokens: int, watts: float | None = None, meter: Measures | None = None
) -> Energy:
    """Joules for a token of a prompt and for one that is written, from the counters or at a given power."""
    meter = meter or Meter()
    if watts is None:
        meter.start()
        why = meter.stop()
        if why.total is None:
            return Energy(why_not=why.why_not or "no counter of this machine's energy could be read")
    elif watts <= 0:
        raise UsageError("--watts must be more than 0", hint="what a wall meter shows while it works")
    rig.need(prompt + tokens, f"a prompt of {prompt:,}")
    rig.tell("energy")
    units: Units = ()

    async def metered(units: Units, tokens: int) -> tuple[Served, float | None]:
        meter.start()
        served = await rig.ask(units, tokens)
        used = meter.stop().total
        return served, served.total_s * watts if watts is not None else used

    async def once() -> tuple[float | None, float | None]:
        nonlocal units
        units = await rig.prose.take(prompt)
        read, read_j = await metered(units, 1)
        written, written_j = await metered(units, tokens)
        if written.computed_tokens > read.computed_tokens // 2:
            written_j = None  # the prompt was computed once more: its energy is in it
        return _each(read_j, read.computed_tokens), _each(written_j, written.written_tokens)

    found, _, _ = await rig.repeated(once)
    source = "the machine's counters" if watts is None else f"{watts:g} W, as given"
    return Energy(stat([decode for _, decode in found]), stat([prefill for prefill, _ in found]), source)


def _each(joules: float | None, tokens: int) -> float | None:
    return joules / tokens if joules is not None and tokens > 0 else None
