"""Reads what a report is made of from the state folder and puts it together; `put_together` is pure.

Files of other versions, half-written ones and those that are not there count as nothing: a report is made of what can
be read. Writes nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill.engine import measured
from tokenmill.engine.measured import Record, machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.address import Address
from tokenmill.jobs.backend import has_batches
from tokenmill.jobs.models import Batch
from tokenmill.jobs.reader import Reader
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Plan
from tokenmill.report import curves
from tokenmill.report.compare import comparisons
from tokenmill.report.gaps import gaps
from tokenmill.report.kept import qualified, soaked
from tokenmill.report.report import BatchReuse, CommandText, ModelFacts, Origin, PlanFacts, Report
from tokenmill.report.tiers import load_for, pictures
from tokenmill.tuner import history, soak_store
from tokenmill.tuner.history import Speed
from tokenmill.tuner.point import Figures, OperatingPoint
from tokenmill.tuner.point_store import points
from tokenmill.tuner.soak import SoakResult
from tokenmill.version import __version__

MOST_BATCHES = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """What the report is about."""

    machine: Machine
    model: str | None = None  # as the user wrote it
    model_id: str | None = None  # None: no files of it are here, so nothing was measured with it
    profile: Profile | None = None
    plan: Plan | None = None
    elsewhere: bool = False  # the machine is another one, known by its description
    commands: tuple[CommandText, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """What the state folder holds of one model on one machine."""

    loads: tuple[Record, ...] = ()
    speeds: tuple[Speed, ...] = ()
    point: OperatingPoint | None = None
    soak: SoakResult | None = None
    qualified: dict[str, Any] | None = None
    batches: tuple[Batch, ...] = ()


def gather(asked: Asked, state: Path, *, batches: Address, when: datetime | None = None) -> Report:
    """Everything that is known, as one value."""
    moment = (when or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return put_together(asked, read(asked, state, batches), moment)


def read(asked: Asked, state: Path, batches: Address) -> Kept:
    """What is kept of the model on the machine; without a model, the batches alone."""
    found = _batches(batches, asked.model_id)
    if asked.model_id is None:
        return Kept(batches=found)
    here = machine_id(asked.machine)
    model = asked.model_id
    return Kept(
        loads=tuple(load for load in measured.read(state) if (load.machine_id, load.model_id) == (here, model)),
        speeds=tuple(speed for speed in history.read(state) if (speed.machine_id, speed.model_id) == (here, model)),
        point=newest_point(state, here, model),
        soak=soak_store.load(state, here, model),
        qualified=_json(state / "qualified" / f"{model}.json"),
        batches=found,
    )


def newest_point(state: Path, machine: str, model: str) -> OperatingPoint | None:
    """The operating point of a model on a machine that was found last, whatever the engine and its build."""
    found = [point for point in points(state) if (point.place.machine_id, point.place.model_id) == (machine, model)]
    return max(found, key=lambda point: point.when, default=None)


def put_together(asked: Asked, kept: Kept, made: str) -> Report:
    """The report. Pure."""
    plan = asked.plan
    load = load_for(asked.plan, kept.loads) if asked.plan else None
    speeds = kept.speeds if any(speed.source == "tune" for speed in kept.speeds) else (*kept.speeds, *_trials(kept))
    forecast = plan.forecast if plan else None
    report = Report(
        made,
        __version__,
        asked.machine,
        model=_model(asked.profile) if asked.profile else None,
        plan=_plan(plan, load) if plan else None,
        tiers=pictures(plan, load) if plan else (),
        bandwidth=tuple(curves.bandwidth_curves(asked.machine)),
        curves=tuple(curves.setting_curves(speeds, kept.point, forecast)),
        depth=tuple(curves.depth_curves(speeds, forecast, plan.settings.ubatch if plan else None)),
        reuse=tuple(_reuse(batch) for batch in kept.batches[-MOST_BATCHES:]),
        comparisons=tuple(comparisons(kept.speeds, load)),
        point=kept.point,
        qualified=qualified(kept.qualified),
        soaked=soaked(kept.soak),
        commands=asked.commands,
    )
    return replace(report, gaps=gaps(report, asked.model, files=asked.model_id is not None, elsewhere=asked.elsewhere))


def _trials(kept: Kept) -> list[Speed]:
    """A point's own trials, where the history has lost them."""
    if kept.point is None:
        return []
    place = kept.point.place
    point = kept.point
    return [
        Speed(
            trial.when or point.when,
            place.machine,
            place.machine_id,
            place.model,
            place.model_id,
            place.engine,
            place.build,
            "tune",
            trial.dials,
            0,
            trial.figures,
            Figures(),
        )
        for trial in point.trials
        if trial.counts
    ]


def _model(profile: Profile) -> ModelFacts:
    experts = profile.experts
    return ModelFacts(
        profile.name,
        profile.architecture,
        profile.quantisation,
        profile.bytes,
        profile.parameters,
        profile.active_parameters,
        profile.layers,
        experts.count if experts else None,
        experts.used if experts else None,
        profile.training_context,
        profile.ghost,
    )


def _plan(plan: Plan, load: Record | None) -> PlanFacts:
    forecast = plan.forecast
    devices = list(dict.fromkeys(plan.placement.layers))
    decode_first = next((speed for speed in forecast.decode if speed.sequences == 1), None)
    prefill = [speed for speed in forecast.prefill if speed.ubatch in (None, plan.settings.ubatch)]
    return PlanFacts(
        plan.fits,
        plan.settings,
        tuple((device, plan.placement.layers.count(device)) for device in devices),
        decode_first.tok_s if decode_first else None,
        prefill[0].tok_s if prefill else None,
        decode_first.confidence if decode_first else None,
        forecast.load_cold_s,
        forecast.load_warm_s,
        forecast.load_bound_by,
        load.load_s if load else None,
        Origin("measured", load.machine, load.build, load.when) if load else None,
        plan.decisions,
        plan.shortfalls,
        plan.changes,
        forecast.notes,
        plan.warnings,
    )


def _batches(address: Address, model_id: str | None) -> tuple[Batch, ...]:
    if not has_batches(address):
        return ()
    with Reader(address) as reader:
        found: Sequence[Batch] = reader.batches()
    return tuple(batch for batch in found if batch.totals.prompt_tokens and model_id in (None, batch.model_id))


def _reuse(batch: Batch) -> BatchReuse:
    totals = batch.totals
    return BatchReuse(
        batch.name,
        Path(batch.source).name,
        datetime.fromtimestamp(batch.created_s, UTC).isoformat(timespec="seconds"),
        batch.counts.total,
        totals.computed,
        totals.reused,
        totals.prompt_tokens - totals.cached_tokens,
        totals.cached_tokens,
        totals.completion_tokens,
    )


def _json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
