"""The targets of the validation, and whether measurements meet them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from prove_rows import Row

from tokenmill.units import MIB

LEDGER_SHARE = 0.02
LEDGER_UNDER_BYTES = 200 * MIB
DECODE_BEFORE = 0.25
DECODE_AFTER = 0.15
PREFILL = 0.30
AGAINST_ONE = 1.8
AGAINST_UNTUNED = 3.0
ENGINE_ITEMS = ("weights", "repack", "kv", "compute", "output")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A prediction and its measurement."""

    what: str
    predicted: float | None
    measured: float | None
    met: bool | None  # None: there is no target, or a value is unknown
    target: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted / self.measured if self.predicted is not None and self.measured else None


def device_totals(rows: Iterable[Row]) -> list[Verdict]:
    """Bytes of every device of every plan: from the driver if it reports them, else from the engine's buffers."""
    found: dict[tuple[str, str], Verdict] = {}
    for row in rows:
        for tier, (predicted, measured) in sorted(_totals(row.get("rows", [])).items()):
            what = f"{row['case']}, {tier}"
            found[row["key"], tier] = Verdict(what, predicted, measured, holds(predicted, measured), "2 %, -200 MiB")
    return list(found.values())


def _totals(rows: list[Row]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row["measured_bytes"] is not None and row["source"] == "engine" and row["item"] in ENGINE_ITEMS:
            predicted, measured = sums.get(row["tier"], (0, 0))
            sums[row["tier"]] = predicted + row["predicted_bytes"], measured + row["measured_bytes"]
    for row in rows:
        if row["item"] == "total" and row["source"] == "driver" and row["measured_bytes"] is not None:
            sums[row["tier"]] = row["predicted_bytes"], row["measured_bytes"]
    return sums


def holds(predicted: float, measured: float) -> bool:
    """Whether a device's ledger meets its target."""
    difference = predicted - measured
    return abs(difference) <= LEDGER_SHARE * measured and -difference <= LEDGER_UNDER_BYTES


def within(predicted: float | None, measured: float | None, share: float) -> bool | None:
    """Whether the error of a forecast is within the limit; None if unknown."""
    return None if predicted is None or not measured else abs(predicted / measured - 1) <= share


def speeds(rows: Iterable[Row]) -> dict[str, list[Verdict]]:
    """Forecasts of decode before and after calibration, and of prefill, each with its target."""
    found: dict[str, list[Verdict]] = {"decode before": [], "decode after": [], "prefill": []}
    for row in rows:
        if "measured" not in row:
            continue
        what = f"{row['case']}, {row['point']}"
        for name, kind, when, share in (
            ("decode before", "decode", "before", DECODE_BEFORE),
            ("decode after", "decode", "after", DECODE_AFTER),
            ("prefill", "prefill", "before", PREFILL),
        ):
            if when == "after" and row["axis"] == "first":
                continue  # the point that calibrated the forecast
            predicted = (row.get(when) or {}).get(kind)
            measured = row["measured"].get(kind)
            if measured is not None:
                met = within(predicted, measured, share)
                found[name].append(Verdict(what, predicted, measured, met, f"{share:.0%}"))
    return found


def batches(rows: Iterable[Row]) -> list[Verdict]:
    """Throughput at the tuned point; `predicted` is the native engine's, `measured` the server's."""
    found = []
    by_load: dict[str, dict[str, float]] = {}
    for row in rows:
        if "tok_s" in row:
            by_load.setdefault(row["load"], {})[row["way"]] = row["tok_s"]
    for load, ways in by_load.items():
        own = ways.get("native, tuned")
        for way, least in (("-np 1", AGAINST_ONE), ("-np 8", None), ("-np 32, untuned", AGAINST_UNTUNED)):
            other = ways.get(way)
            if own is not None and other:
                met = None if least is None else own / other >= least
                target = "" if least is None else f"{least:g} times"
                found.append(Verdict(f"{load}: native against {way}", own, other, met, target))
    return found


def summary(verdicts: Iterable[Verdict]) -> tuple[int, int, float | None, float | None]:
    """Number of targets met and in total, the median error, and the largest error."""
    judged = [verdict for verdict in verdicts if verdict.met is not None and verdict.ratio is not None]
    errors = [abs((verdict.ratio or 1) - 1) for verdict in judged]
    return (
        sum(bool(verdict.met) for verdict in judged),
        len(judged),
        median(errors) if errors else None,
        max(errors, default=None),
    )
