"""Collects the measurements of a machine and a model from the state folder into a `ReportPage`.

`collect` reads and builds; `build_report` is its pure half. Records that are missing, damaged or of another version
count as absent, so a report shows everything that can be read. Writes nothing.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill import measurements
from tokenmill.engine import load_history
from tokenmill.engine.load_history import LoadRecord
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.models import Batch
from tokenmill.jobs.store.address import Address
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Plan
from tokenmill.report import curves
from tokenmill.report.batches import FinishReasons, batch_reuse, read_batches
from tokenmill.report.compare import comparisons, load_for, pictures
from tokenmill.report.report import (
    PREDICTED,
    ChartCurve,
    CommandText,
    FigureOrigin,
    Gap,
    ModelFacts,
    PlanFacts,
    Qualified,
    QualityCheck,
    ReportPage,
    Series,
    Soaked,
)
from tokenmill.tuner import history
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, OperatingPoint
from tokenmill.tuner.point_store import points
from tokenmill.tuner.soak import store as soak_store
from tokenmill.tuner.soak.judge import SoakResult, SoakStep
from tokenmill.units import GIB
from tokenmill.version import __version__


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine and, optionally, the model and plan to report on."""

    machine: Machine
    model: str | None = None  # as the user wrote it
    model_id: str | None = None  # None: the model is not on this machine, so it was never measured here
    profile: Profile | None = None
    plan: Plan | None = None
    elsewhere: bool = False  # the machine is a description, not this machine
    commands: tuple[CommandText, ...] = ()


@dataclass(frozen=True, slots=True)
class Results:
    """The stored results of one model on one machine."""

    loads: tuple[LoadRecord, ...] = ()
    speeds: tuple[SpeedRecord, ...] = ()
    point: OperatingPoint | None = None
    soak: SoakResult | None = None
    qualified: dict[str, Any] | None = None
    batches: tuple[Batch, ...] = ()
    finish_reasons: FinishReasons = field(default_factory=dict)


def collect(subject: Subject, state: Path, *, batches: Address, when: datetime | None = None) -> ReportPage:
    """Read the state folder and the batches, and build the report."""
    moment = (when or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return build_report(subject, read(subject, state, batches), moment)


def read(subject: Subject, state: Path, batches: Address) -> Results:
    """Stored results of the model on the machine; without a model, only the batches of this machine."""
    never_run = subject.elsewhere or (subject.model is not None and subject.model_id is None)
    found, reasons = ((), {}) if never_run else read_batches(batches, subject.model_id)
    if subject.model_id is None:
        return Results(batches=found, finish_reasons=reasons)
    here = machine_id(subject.machine)
    model = subject.model_id
    return Results(
        loads=load_history.read(state, machine_id=here, model_id=model),
        speeds=history.read(state, machine_id=here, model_id=model),
        point=newest_point(state, here, model),
        soak=soak_store.load(state, here, model),
        qualified=next(reversed(measurements.read_json(state, "qualification", model_id=model)), None),
        batches=found,
        finish_reasons=reasons,
    )


def newest_point(state: Path, machine: str, model: str) -> OperatingPoint | None:
    """The newest operating point of a model on a machine, for any engine and build."""
    found = [point for point in points(state) if (point.place.machine_id, point.place.model_id) == (machine, model)]
    return max(found, key=lambda point: point.when, default=None)


def build_report(subject: Subject, results: Results, made: str) -> ReportPage:
    """Build the report; pure."""
    plan = subject.plan
    load = load_for(subject.plan, results.loads) if subject.plan else None
    tuned = any(speed.source == "tune" for speed in results.speeds)
    speeds = results.speeds if tuned else (*results.speeds, *_trials(results))
    forecast = plan.forecast if plan else None
    report = ReportPage(
        made,
        __version__,
        subject.machine,
        model=_model(subject.profile) if subject.profile else None,
        plan=_plan(plan, load) if plan else None,
        tiers=pictures(plan, load) if plan else (),
        bandwidth=tuple(curves.bandwidth_curves(subject.machine)),
        curves=tuple(curves.setting_curves(speeds, results.point, forecast)),
        depth=tuple(curves.depth_curves(speeds, forecast, plan.settings.ubatch if plan else None)),
        reuse=tuple(batch_reuse(batch, results.finish_reasons.get(batch.name)) for batch in results.batches),
        comparisons=tuple(comparisons(results.speeds, load)),
        point=results.point,
        qualified=qualified(results.qualified),
        soaked=soaked(results.soak),
        commands=subject.commands,
    )
    files = subject.model_id is not None
    return replace(report, gaps=gaps(report, subject.model, files=files, elsewhere=subject.elsewhere))


def _trials(results: Results) -> list[SpeedRecord]:
    """The trials stored with the operating point, as a substitute for a history without them."""
    if results.point is None:
        return []
    place = results.point.place
    point = results.point
    return [
        SpeedRecord(
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


def _plan(plan: Plan, load: LoadRecord | None) -> PlanFacts:
    forecast = plan.forecast
    devices = list(dict.fromkeys(plan.placement.layers))
    decode_first = next((speed for speed in forecast.decode if speed.sequences == 1), None)
    return PlanFacts(
        plan.fits,
        plan.settings,
        tuple((device, plan.placement.layers.count(device)) for device in devices),
        decode_first.tok_s if decode_first else None,
        forecast.prefill_tok_s,
        decode_first.confidence if decode_first else None,
        forecast.load_cold_s,
        forecast.load_warm_s,
        forecast.load_bound_by,
        load.load_s if load else None,
        FigureOrigin("measured", load.machine, load.build, load.when) if load else None,
        plan.decisions,
        plan.shortfalls,
        plan.changes,
        forecast.notes,
        plan.warnings,
        forecast.jobs,
        plan.longest_context,
    )


def qualified(data: Mapping[str, Any] | None) -> Qualified | None:
    """A qualification; None if it is missing or unreadable."""
    if data is None:
        return None
    checks = tuple(_checks(data.get("checks", data)))
    return Qualified(checks, _origin(data), _text(data.get("verdict"))) if checks else None


def soaked(result: SoakResult | None) -> Soaked | None:
    """A soak, with a chart of each memory."""
    if result is None:
        return None
    origin = FigureOrigin("measured", result.machine, result.build, result.when)
    reason = result.reason + (f"; last output of the engine: {result.last_words}" if result.last_words else "")
    return Soaked(result.usable_context, result.goal, reason, origin, tuple(_soak_curves(result.steps, origin)))


def _checks(data: object) -> Iterator[QualityCheck]:
    for name, row in data.items() if isinstance(data, Mapping) else ():
        if not isinstance(row, Mapping):
            continue
        score = _number(row.get("score"))
        threshold = _number(row.get("threshold"))
        good = row.get("good")
        if not isinstance(good, bool):
            good = None if score is None or threshold is None else score >= threshold
        if score is not None:
            yield QualityCheck(str(name), score, threshold, good, _text(row.get("words")))


def _soak_curves(steps: Sequence[SoakStep], origin: FigureOrigin) -> Iterator[ChartCurve]:
    """Predicted and measured memory by depth, for the first tested number of sequences."""
    alike = [step for step in steps if step.sequences == steps[0].sequences]
    for tier in dict.fromkeys(reading.tier for step in alike for reading in step.memory):
        rows = [(float(step.depth), reading) for step in alike for reading in step.memory if reading.tier == tier]
        measured = curves.dots((x, row.measured_bytes / GIB) for x, row in rows if row.measured_bytes is not None)
        predicted = curves.dots((x, row.predicted_bytes / GIB) for x, row in rows if row.predicted_bytes is not None)
        lines = [Series("measured", origin, measured), Series("predicted", PREDICTED, predicted)]
        if len(measured) > 1:
            shown = tuple(line for line in lines if line.dots)
            yield ChartCurve(f"soak-{tier}", f"Memory of {tier} by depth", "tokens in the context", "GiB", shown)


def _origin(data: Mapping[str, Any]) -> FigureOrigin:
    return FigureOrigin("measured", _text(data.get("machine")), _text(data.get("build")), _text(data.get("when")))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def gaps(report: ReportPage, model: str | None, *, files: bool, elsewhere: bool) -> tuple[Gap, ...]:
    """Missing figures, by section. `files`: the model is on this machine; `elsewhere`: see `Subject`."""
    found = []
    if report.machine.measured is None and not elsewhere:
        found.append(Gap("machine", "bandwidth has not been measured yet", "tokenmill probe --measure -o machine.toml"))
    if model is None:
        found.append(Gap("plan", "no model was given, so there is no plan", "tokenmill report MODEL -o report.html"))
    elif report.plan is None:
        found.append(
            Gap(
                "plan",
                "there is no plan, because the engine is a running server",
                f"tokenmill plan {shlex.quote(model)}",
            )
        )
    if model is not None and elsewhere:
        words = f"all figures are predicted, because {report.machine.name} is another machine; run this there"
        found.append(Gap("point", words, f"tokenmill tune {shlex.quote(model)}"))
    elif model is not None and not files:
        words = "all figures are predicted, because the model is not on this machine"
        found.append(Gap("point", words, f"tokenmill models pull {shlex.quote(model)}"))
    elif model is not None:
        found += _measurement_gaps(report, shlex.quote(model))
    if not report.reuse and not elsewhere:
        run = "tokenmill run jobs.jsonl --output results.jsonl"
        command = run if model is None else f"{run} --model {shlex.quote(model)}"
        found.append(Gap("reuse", "no batch has run yet", command))
    return tuple(found)


def _measurement_gaps(report: ReportPage, model: str) -> Iterator[Gap]:
    if not _has_measured(report.curves, "threads"):
        yield Gap("curves", "speed by threads has not been measured yet", f"tokenmill tune {model}")
    if not _has_measured(report.curves, "sequences"):
        yield Gap("curves", "speed by sequences has not been measured yet", f"tokenmill tune {model}")
    if not any(line.origin.kind == "measured" for curve in report.depth for line in curve.lines):
        yield Gap("depth", "speed by context depth has not been measured yet", f"tokenmill bench {model}")
    if report.tiers and all(tier.loaded is None for tier in report.tiers):
        yield Gap("tiers", "the model has not been loaded yet", f"tokenmill serve {model}")
    if not report.comparisons:
        yield Gap("comparisons", "no measurement yet to compare the forecast with", f"tokenmill bench {model}")
    if report.point is None:
        yield Gap("point", "no operating point yet", f"tokenmill tune {model}")
    if report.soaked is None:
        yield Gap("soaked", "the usable context has not been tested yet", f"tokenmill soak {model}")
    if report.qualified is None:
        yield Gap("qualified", "the quality of the quantization has not been checked yet", f"tokenmill qualify {model}")


def _has_measured(found: tuple[ChartCurve, ...], key: str) -> bool:
    return any(line.origin.kind == "measured" for curve in found if curve.key == key for line in curve.lines)
