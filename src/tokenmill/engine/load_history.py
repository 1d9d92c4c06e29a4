"""Measured loads next to their predictions, as records of the measurement journal."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill import measurements
from tokenmill.engine.reconcile.reconcile import ReconciledItem, Reconciliation
from tokenmill.errors import TokenmillError
from tokenmill.hardware.identity import machine_id
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One load."""

    when: str  # ISO 8601, UTC
    machine: str  # name
    machine_id: str
    model: str
    model_id: str
    build: str | None
    settings: dict[str, Any]
    rows: tuple[ReconciledItem, ...]
    load_s: float | None = None  # measured, start to ready
    load_cold_s: float | None = None  # predicted
    load_warm_s: float | None = None
    types: dict[str, int] = field(default_factory=dict)  # weight bytes by tensor type


def record(
    plan: Plan, found: Reconciliation, *, model_id: str, load_s: float | None = None, when: datetime | None = None
) -> LoadRecord:
    """Create the record of a load that ended at `when` (default: now)."""
    moment = (when or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return LoadRecord(
        moment,
        plan.machine.name,
        machine_id(plan.machine),
        plan.profile.name,
        model_id,
        found.build,
        asdict(plan.settings),
        found.rows,
        load_s,
        plan.forecast.load_cold_s,
        plan.forecast.load_warm_s,
        types_of(plan.profile),
    )


def types_of(profile: Profile) -> dict[str, int]:
    """Weight bytes by tensor type."""
    sizes: Counter[str] = Counter()
    for tensor in profile.tensors:
        sizes[tensor.type] += tensor.bytes
    return dict(sizes)


def append(state: Path, record: LoadRecord) -> None:
    """Store a load. A failure to write the journal is only logged, because the engine is usable without it."""
    try:
        measurements.append(state, "load", record)
    except TokenmillError as error:
        log.warning("%s", error.message)


def read(state: Path, *, machine_id: str | None = None, model_id: str | None = None) -> tuple[LoadRecord, ...]:
    """Return stored loads, oldest first."""
    return tuple(measurements.read(state, "load", LoadRecord, machine_id=machine_id, model_id=model_id))
