"""Repeats the predictions for measured points with the present version.

Measurements improve the model, so a page with the original predictions would show outdated errors. A page made with
`--again` states that these predictions come from a version that was calibrated with the same measurements.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import prove_slice
from prove_batch import WAYS, Work, plan_of
from prove_digest import FULL, server_plan
from prove_plans import Case, Point, calibrated, cases, forecast, ledger_at
from prove_rows import Row

from tokenmill.engine.reconcile.reconcile import spanned_bytes
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.plan import Ledger, Plan
from tokenmill.tuner.point import Figures

DIGEST = "llama-server, digest-np"
MAPPED = (("host", "weights"), ("host", "mapped"))
PLANNED = ("weights", "kv", "compute", "runtime", "total")  # items of a GPU under the names of the plan


def slice_profile(layers: int = prove_slice.LAYERS) -> Profile:
    """The model profile of the slice, without its weights."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "slice.gguf"
        made = prove_slice.head(layers)
        with path.open("wb") as file:
            file.write(made.raw)
            file.truncate(made.header.file_bytes)
        return read(str(path))


def on_card(ledger: Ledger, tier: str, item: str = "total") -> int:
    """Bytes of a GPU after loading, in the items that an engine and a driver report."""
    rows = [row for row in ledger.after_load if row.tier == tier and row.item != "reserve"]
    if item == "total":
        return sum(row.bytes for row in rows)
    names = ("compute", "staging") if item == "compute" else (item,)
    return sum(row.bytes for row in rows if row.item in names)


def point_of(row: Row) -> Point:
    """The point at which a speed was measured."""
    dials = row["dials"]
    return Point(row["axis"], dials["threads"], dials["sequences"], dials["ubatch"], row["head"])


class Again:
    """Predicts anew."""

    def __init__(self, machine: Machine, profile: Profile) -> None:
        self.cases: dict[str, Case] = {case.name: case for case in cases(machine, profile)}
        self._work = Work(machine, profile, Path(), {}, Path(), tiny=False)
        servers = {f"llama-server, np{slots}": plan_of(self._work, way) for way, slots in WAYS.items()}
        self.plans: dict[str, Plan] = {name: case.plan for name, case in self.cases.items()} | servers

    def plan(self, case: str) -> Plan | None:
        """Settings of a ledger's row."""
        if case.startswith(DIGEST):
            return server_plan(self._work, FULL, int(case.removeprefix(DIGEST)))
        return self.plans.get(case)

    def ledger(self, row: Row) -> Row:
        """A row of a ledger with the present prediction for the GPU and for mapped files; other rows are unchanged."""
        plan = self.plan(row.get("case", ""))
        if plan is None or "rows" not in row:
            return row
        ledger = plan.ledger
        items = [
            {**item, "predicted_bytes": on_card(ledger, item["tier"], item["item"])}
            if item["tier"].startswith("gpu") and item["item"] in PLANNED
            else {**item, "predicted_bytes": spanned_bytes(plan) or item["predicted_bytes"]}
            if plan.settings.mmap and (item["tier"], item["item"]) in MAPPED
            else item
            for item in row["rows"]
        ]
        load = {"load_warm_s": plan.forecast.load_warm_s, "load_cold_s": plan.forecast.load_cold_s}
        return {**row, "rows": items, **load}

    def speed(self, row: Row, first: Row | None) -> Row:
        """A row of a speed with the present forecasts, calibrated by the plan's first point if there is one."""
        case = self.cases.get(row.get("case", ""))
        if case is None or "measured" not in row:
            return row
        point = point_of(row)
        known = None
        if first is not None:
            found = Figures(first["measured"]["decode"], first["measured"]["prefill"])
            known = calibrated(case, point_of(first), found, machine_id="m", model_id="slice", when=first["when"])
        after = None if known is None else _told(forecast(case.plan, point, known))
        ledger = ledger_at(case.plan, point)
        taken = {tier: on_card(ledger, tier) for tier in row["vram_predicted"]}
        return {**row, "before": _told(forecast(case.plan, point)), "after": after, "vram_predicted": taken}

    def tables(self, found: dict[str, dict[str, Row]]) -> dict[str, dict[str, Row]]:
        """All rows, with new predictions of memory and speed."""
        speeds = found["speed"]
        firsts = {row["case"]: row for row in speeds.values() if row.get("axis") == "first" and "measured" in row}
        return {
            **found,
            "ledger": {key: self.ledger(row) for key, row in found["ledger"].items()},
            "speed": {key: self.speed(row, firsts.get(row.get("case", ""))) for key, row in speeds.items()},
        }


def _told(figures: Figures) -> dict[str, float | None]:
    return {"decode": figures.decode_tok_s, "prefill": figures.prefill_tok_s}
