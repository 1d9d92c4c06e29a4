"""Measurements as rows, one per quantity with its prediction, and their trends. Pure functions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from tokenmill.api.engines.speeds import StageSpeed
from tokenmill.engine.load_history import LoadRecord
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import TrialSettings

MIN_LOAD_S = 5.0  # shorter predicted loads are not compared with measured ones
DEFAULT_UBATCH = 512  # of the engines
COMPARED = 10  # number of first and of last predictions whose errors are compared
UNITS = {
    "decode": "tok/s",
    "prefill": "tok/s",
    "jobs": "tok/s",
    "first token": "s",
    "energy": "J/token",
    "batch prefill": "tok/s",
    "batch decode": "tok/s",
    "host": "bytes",
    "gpu": "bytes",
    "load": "s",
    "memory": "bytes",
}
_FIGURES = {
    "decode": "decode_tok_s",
    "prefill": "prefill_tok_s",
    "jobs": "jobs_tok_s",
    "first token": "first_token_s",
    "energy": "joules_per_token",
    "host": "host_bytes",
    "gpu": "gpu_bytes",
}


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One quantity, measured once."""

    when: str  # ISO 8601, UTC
    machine: str
    machine_id: str
    model: str
    model_id: str
    engine: str | None  # None: not recorded
    build: str | None
    source: str  # tune, bench, run, soak, load
    settings: str  # short description
    depth: int | None
    quantity: str
    measured: float
    predicted: float | None

    @property
    def unit(self) -> str:
        """The unit of both figures."""
        return UNITS[self.quantity]

    @property
    def error(self) -> float | None:
        """The prediction error relative to the measured value; positive: predicted too high."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Trend:
    """One quantity of one model on one machine over time."""

    model: str
    machine: str
    quantity: str
    unit: str
    measured: tuple[float, ...]  # oldest first
    last: HistoryRow
    first_error: float | None  # median absolute error of the first predictions
    last_error: float | None
    predictions: int


def rows_of(
    speeds: Iterable[SpeedRecord], loads: Iterable[LoadRecord], batches: Iterable[StageSpeed] = ()
) -> list[HistoryRow]:
    """All measurements, oldest first."""
    found = [*(row for speed in speeds for row in _of_speed(speed)), *(row for load in loads for row in _of_load(load))]
    models = {row.model_id: row.model for row in found}
    machines = {row.machine_id: row.machine for row in found}
    for batch in batches:
        model = models.get(batch.model_id, batch.model_id[:12])
        machine = machines.get(batch.machine_id, batch.machine_id[:12])
        found += _of_batch(batch, model, machine)
    return sorted(found, key=lambda row: row.when)


def trends(rows: Sequence[HistoryRow]) -> list[Trend]:
    """Trends by model, machine and quantity; a model has its most recent name."""
    names = {row.model_id: row.model for row in rows}
    groups: dict[tuple[str, str, str], list[HistoryRow]] = {}
    for row in rows:
        groups.setdefault((row.model_id, row.machine_id, row.quantity), []).append(row)
    order = list(UNITS)
    found = [_trend(group, names[group[0].model_id]) for group in groups.values()]
    return sorted(found, key=lambda trend: (trend.model, trend.machine, order.index(trend.quantity)))


def errors(rows: Sequence[HistoryRow]) -> tuple[float | None, float | None, int]:
    """Median absolute errors of the first and the last ten predictions, and the number of predictions."""
    sizes = [abs(row.error) for row in rows if row.error is not None]
    if not sizes:
        return None, None, 0
    return median(sizes[:COMPARED]), median(sizes[-COMPARED:]), len(sizes)


def speeds_in(rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    """The rows that are speeds."""
    return [row for row in rows if row.unit == "tok/s"]


def settings_text(settings: TrialSettings) -> str:
    """A short description of the settings: threads, sequences and non-default values."""
    threads = f"{settings.threads}"
    if settings.threads != settings.threads_batch:
        threads += f"/{settings.threads_batch}"
    parts = [
        f"{threads} thread{'' if threads == '1' else 's'}",
        f"{settings.sequences} slot{'' if settings.sequences == 1 else 's'}",
    ]
    default = TrialSettings(
        settings.threads, settings.threads_batch, settings.sequences, DEFAULT_UBATCH, settings.context
    )
    if settings.ubatch != default.ubatch:
        parts.append(f"ubatch {settings.ubatch}")
    if (settings.cache_type_k, settings.cache_type_v) != (default.cache_type_k, default.cache_type_v):
        parts.append(f"cache {settings.cache_type_k}/{settings.cache_type_v}")
    if not settings.flash_attention:
        parts.append("no flash attention")
    if settings.placement != default.placement:
        parts.append(settings.placement)
    return ", ".join(parts)


def _of_speed(speed: SpeedRecord) -> Iterator[HistoryRow]:
    for quantity, name in _FIGURES.items():
        measured = getattr(speed.figures, name)
        if measured is not None:
            yield HistoryRow(
                speed.when,
                speed.machine,
                speed.machine_id,
                speed.model,
                speed.model_id,
                speed.engine,
                speed.build,
                speed.source,
                settings_text(speed.dials),
                speed.depth,
                quantity,
                measured,
                getattr(speed.predicted, name),
            )


def _of_batch(batch: StageSpeed, model: str, machine: str) -> Iterator[HistoryRow]:
    """Speeds of a batch, which other programs may have slowed down; so they are not compared with predictions."""
    settings = f"{batch.lanes:.1f} slots busy, {batch.answers:,} answers"
    for quantity, rate in (("batch prefill", batch.prefill_tok_s), ("batch decode", batch.decode_tok_s)):
        yield HistoryRow(
            batch.when,
            machine,
            batch.machine_id,
            model,
            batch.model_id,
            batch.engine,
            batch.build,
            "run",
            settings,
            None,
            quantity,
            rate,
            None,
        )


def _of_load(load: LoadRecord) -> Iterator[HistoryRow]:
    settings = f"{load.settings.get('sequences')} x {load.settings.get('context')} tokens"
    given = (
        load.when,
        load.machine,
        load.machine_id,
        load.model,
        load.model_id,
        None,
        load.build,
        "load",
        settings,
        None,
    )
    if load.load_s is not None:
        yield HistoryRow(*given, "load", load.load_s, _between(load))
    # the engine's items only: the process's memory as the system reports it contains them again
    known = [row for row in load.rows if row.measured_bytes is not None and row.source == "engine"]
    if known:
        measured = sum(row.measured_bytes or 0 for row in known)
        yield HistoryRow(*given, "memory", measured, sum(row.predicted_bytes for row in known))


def _between(load: LoadRecord) -> float | None:
    """The point of the predicted range, from a warm to a cold page cache, that is nearest to the measured value.

    None for small models: forecasts leave out the start of the process, which then takes most of the time.
    """
    ends = [end for end in (load.load_warm_s, load.load_cold_s) if end is not None]
    if not ends or max(ends) < MIN_LOAD_S:
        return None
    return min(max(load.load_s or 0.0, min(ends)), max(ends))


def _trend(rows: Sequence[HistoryRow], model: str) -> Trend:
    newest = rows[-1]
    return Trend(
        model, newest.machine, newest.quantity, newest.unit, tuple(row.measured for row in rows), newest, *errors(rows)
    )
