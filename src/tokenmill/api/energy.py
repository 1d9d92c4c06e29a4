"""Energy of a run: the machine's counters, read while the engine works."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tokenmill.tuner.energy import Joules, Meter

_UPDATE_S = 60.0  # counters of CPUs wrap after minutes


@dataclass(slots=True)
class EnergyUse:
    """The energy used in a block of `energy_metered`, known at its end."""

    joules: Joules = Joules()  # noqa: RUF009  frozen
    seconds: float = 0.0

    @property
    def watts(self) -> float | None:
        """Mean power; None: unknown."""
        total = self.joules.total
        return None if total is None or self.seconds <= 0 else total / self.seconds


@asynccontextmanager
async def energy_metered() -> AsyncIterator[EnergyUse]:
    """Measure the energy of the whole machine, other programs included."""
    meter = Meter()
    use = EnergyUse()
    await asyncio.to_thread(meter.start)
    began_s = time.monotonic()
    updates = asyncio.create_task(_update(meter))
    try:
        yield use
    finally:
        updates.cancel()
        with suppress(asyncio.CancelledError):
            await updates
        use.joules = await asyncio.to_thread(meter.stop)
        use.seconds = time.monotonic() - began_s


async def _update(meter: Meter) -> None:
    while True:
        await asyncio.sleep(_UPDATE_S)
        await asyncio.to_thread(meter.update)
