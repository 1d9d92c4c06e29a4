"""Joules per token, and the cost of a million tokens at a price of electricity.

Counters and wall meters include the whole machine and its idle power. The cost is that of electricity alone. Prefill
and decode are measured separately, because they differ by an order of magnitude.
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


class EnergyMeter(Protocol):
    """Measures joules between two moments."""

    def start(self) -> None:
        """Start measuring."""

    def stop(self) -> Joules:
        """Energy used since `start`."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a kilowatt-hour."""

    per_kwh: float
    currency: str = ""

    def of_million(self, joules_per_token: float) -> float:
        """The price of a million tokens."""
        return joules_per_token * 1e6 / _KWH_J * self.per_kwh


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules per token; None if unknown, for the reason `why_not`."""

    decode_j: Stat | None = None  # per generated token
    prefill_j: Stat | None = None  # per prompt token
    source: str | None = None  # counters, or a given power
    why_not: str | None = None


def parse_price(text: str) -> Price:
    """`0.30`, `0.30/kWh`, `0,30 EUR/kWh`, `$0.12`."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"invalid price of electricity {text!r}", hint="for example --price 0.30/kWh", code="invalid_price"
        )
    return Price(float(match[2].replace(",", ".")), match[1] or match[3])


async def energy(
    rig: Rig, *, prompt: int, tokens: int, watts: float | None = None, meter: EnergyMeter | None = None
) -> Energy:
    """Joules per prompt token and per generated token, from the counters or from a given power."""
    meter = meter or Meter()
    if watts is None:
        meter.start()
        why = meter.stop()
        if why.total is None:
            return Energy(why_not=why.why_not or "this machine has no readable energy counter")
    elif watts <= 0:
        raise UsageError(
            f"--watts must be more than 0 (got {watts:g})", hint="read a wall meter while the engine works"
        )
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
            written_j = None  # includes the energy of a recomputed prompt
        return _each(read_j, read.computed_tokens), _each(written_j, written.written_tokens)

    found, _, _ = await rig.repeated(once)
    source = "the machine's counters" if watts is None else f"the given {watts:g} W"
    return Energy(stat([decode for _, decode in found]), stat([prefill for prefill, _ in found]), source)


def _each(joules: float | None, tokens: int) -> float | None:
    return joules / tokens if joules is not None and tokens > 0 else None
