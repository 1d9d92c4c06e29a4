"""How many slots a run used, by the engine's own counts per forward pass, and what limited them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenmill.engine.engine import Counters, SlotLimit


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Forward passes with batch requests."""

    steps: int = 0
    slot_steps: int = 0  # running requests, summed over passes
    limited_steps: Mapping[SlotLimit, int] = field(default_factory=dict)  # by what kept more from running

    @property
    def slots(self) -> float:
        """Average number of running requests."""
        return self.slot_steps / self.steps if self.steps else 0.0

    def share(self, limit: SlotLimit) -> float:
        """The share of passes with this limit."""
        return self.limited_steps.get(limit, 0) / self.steps if self.steps else 0.0

    def plus(self, now: Counters, before: Counters) -> "SlotUse":
        """With the passes between two statuses of an engine, which may have restarted in between."""
        if now.slot_steps is None or now.limited_steps is None:
            return self
        old = dict(before.limited_steps or {})
        if before.slot_steps is None or before.slot_steps > now.slot_steps:
            old, start = {}, 0
        else:
            start = before.slot_steps
        new = {limit: steps - old.get(limit, 0) for limit, steps in now.limited_steps.items()}
        return combined([self, SlotUse(sum(new.values()), now.slot_steps - start, new)])


def combined(every: Iterable[SlotUse]) -> SlotUse:
    """The sums of several engines."""
    parts = list(every)
    limits: dict[SlotLimit, int] = {}
    for part in parts:
        for limit, steps in part.limited_steps.items():
            limits[limit] = limits.get(limit, 0) + steps
    return SlotUse(sum(part.steps for part in parts), sum(part.slot_steps for part in parts), limits)
