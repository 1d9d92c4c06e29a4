"""Several engines on one machine: the sums of their memory, threads and memory bandwidth. Pure.

Every plan is made as if its engine were alone; engines load one after the other, in the order of their plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import TensorClass
from tokenmill.planner.draft import capacity
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import Plan, Shortfall, Speed

_GPU_ONLY_THREADS = 1  # an engine that computes nothing on the CPU keeps about one core busy


@dataclass(frozen=True, slots=True)
class SharedTier:
    """One memory that several engines use, at full context."""

    name: str
    by_engine: Mapping[str, int]  # bytes, without reserves
    reserve_bytes: int  # kept free, once for all engines
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes of all engines and the reserve."""
        return sum(self.by_engine.values()) + self.reserve_bytes


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """One engine, alone and while the others decode as well."""

    name: str
    plan: Plan
    threads: int  # CPU threads that it keeps busy
    host_gb_s: float | None  # read from host memory while it decodes alone; None: no forecast
    decode_tok_s: float | None  # of all its sequences, alone
    together_tok_s: float | None  # while all engines decode


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """The engines' plans, and what they need together."""

    machine: Machine
    engines: tuple[SharedEngine, ...]
    tiers: tuple[SharedTier, ...]
    shortfalls: tuple[Shortfall, ...]
    cores: int | None  # physical cores without the reserved ones; None: unknown

    @property
    def threads(self) -> int:
        """Busy threads of all engines."""
        return sum(engine.threads for engine in self.engines)

    @property
    def fits(self) -> bool:
        """Whether every memory holds the share of all engines; too many threads only make them slow."""
        return not self.shortfalls and all(engine.plan.fits for engine in self.engines)


def share_machine(machine: Machine, plans: Mapping[str, Plan], *, reserve_cores: int = 0) -> SharedMachine:
    """Add up plans for one machine; raises ValueError without plans."""
    if not plans:
        raise ValueError("no plans")
    cores = machine.cpu.cores
    tiers = tuple(_tier(machine, name, plans) for name in _used(machine, plans))
    return SharedMachine(
        machine,
        _engines(machine, plans),
        tiers,
        tuple(filter(None, (_shortfall(tier, list(plans.values())) for tier in tiers))),
        None if cores is None else cores - reserve_cores,
    )


def _used(machine: Machine, plans: Mapping[str, Plan]) -> list[str]:
    return [tier.name for tier in machine.tiers() if any(plan.ledger.needed(tier.name) for plan in plans.values())]


def _tier(machine: Machine, name: str, plans: Mapping[str, Plan]) -> SharedTier:
    reserves = [plan.ledger.of(name, "reserve") for plan in plans.values()]
    used = {engine: plan.ledger.needed(name) - plan.ledger.of(name, "reserve") for engine, plan in plans.items()}
    return SharedTier(name, used, max(reserves), capacity(machine, name))


def _shortfall(tier: SharedTier, plans: Sequence[Plan]) -> Shortfall | None:
    """Missing bytes at full context of all engines, or while one loads after the others."""
    if tier.needed_bytes > tier.available_bytes:
        return Shortfall(tier.name, tier.needed_bytes, tier.available_bytes, "full_context")
    before = tier.reserve_bytes
    for plan, used in zip(plans, tier.by_engine.values(), strict=True):
        peak = before + plan.ledger.needed(tier.name, "load_peak") - plan.ledger.of(tier.name, "reserve")
        if peak > tier.available_bytes:
            return Shortfall(tier.name, peak, tier.available_bytes, "load_peak")
        before += used
    return None


def _engines(machine: Machine, plans: Mapping[str, Plan]) -> tuple[SharedEngine, ...]:
    host = host_tier(machine)
    speeds = {name: _decode(plan) for name, plan in plans.items()}
    # the share of its time that an engine waits for host memory; beyond 1 in sum, each waits longer
    demand = sum(_host_seconds(speed, host) / _seconds(speed) for speed in speeds.values() if speed is not None)
    slower = max(1.0, demand)
    engines = []
    for name, plan in plans.items():
        speed = speeds[name]
        alone = None if speed is None else speed.tok_s
        together = None
        read = None
        if speed is not None:
            seconds = _seconds(speed)
            moved = sum(term.bytes or 0.0 for term in speed.terms if term.name.startswith(f"{host} "))
            read = moved / seconds / 1e9
            together = speed.tok_s * seconds / (seconds + (slower - 1) * _host_seconds(speed, host))
        engines.append(SharedEngine(name, plan, _threads(plan), read, alone, together))
    return tuple(engines)


def _decode(plan: Plan) -> Speed | None:
    """The forecast of all sequences together with a short context."""
    return next((speed for speed in plan.forecast.decode if speed.sequences == plan.settings.sequences), None)


def _seconds(speed: Speed) -> float:
    return sum(term.seconds for term in speed.terms)


def _host_seconds(speed: Speed, host: str) -> float:
    return sum(term.seconds for term in speed.terms if term.name.startswith(f"{host} "))


def _threads(plan: Plan) -> int:
    """Threads of an engine; one that only looks up embeddings in host memory does not compute there."""
    computes = any(
        not home.startswith("gpu") and tensor.cls not in (TensorClass.EMBEDDING, TensorClass.MTP)
        for tensor, home in zip(plan.profile.tensors, plan.placement.homes, strict=True)
    )
    return plan.settings.threads if computes else _GPU_ONLY_THREADS
