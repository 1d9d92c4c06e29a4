"""Plans and forecasts against an H200 that ran them: five layers of Kimi-K2.5, rows of bench/gpu/prove.py.

The rows lie in docs/validation; what is predicted is what the present version says of the same plans.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prove_again import Again, slice_profile
from prove_judge import DECODE_AFTER, DECODE_BEFORE, PREFILL
from prove_rows import Row, read

from tokenmill.hardware import machine_file
from tokenmill.planner.speed import forecast, rates
from tokenmill.units import MIB

FOLDER = Path(__file__).parents[3] / "docs" / "validation" / "h200-kimi-slice"
LEDGERS, SPEEDS = read([FOLDER], "ledger"), read([FOLDER], "speed")
PLANNED = [key for key in LEDGERS if not key.startswith("llama-server")]
NEAR_BYTES = 4 * MIB  # the driver counts in 2 MiB
DRAW_NS = 0.6  # per token of the vocabulary, in the version that measured the rows: it sampled one row after another


@cache
def tables() -> dict[str, dict[str, Row]]:
    """All rows, predicted anew, with the sampling of the version that measured them."""
    with patch.object(forecast, "standard", lambda: replace(rates.standard(), draw_ns=DRAW_NS)):
        again = Again(machine_file.read(FOLDER / "machine.toml"), slice_profile())
        return again.tables({"ledger": LEDGERS, "speed": SPEEDS})


def test_the_expected_rows_exist() -> None:
    assert len(PLANNED) == 5
    assert len(SPEEDS) == 45


@pytest.mark.parametrize("key", PLANNED)
def test_every_item_on_the_card_is_as_planned(key: str) -> None:
    items = {row["item"]: row for row in tables()["ledger"][key]["rows"] if row["tier"] == "gpu0"}
    assert items.keys() == {"weights", "kv", "compute", "runtime", "total"}
    for name, row in items.items():
        near = NEAR_BYTES if name in ("runtime", "total") else 0.1 * MIB
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], abs=near), name


@pytest.mark.parametrize(
    ("key", "spare_mib"),
    [
        ("llama-server, np1", 4),
        ("llama-server, np8", 4),
        ("llama-server, np32", 4),
        ("llama-server, digest-np65", 132),  # it ran no prompt, for which the plan counts scratch memory
    ],
)
def test_a_server_uses_the_planned_memory(key: str, spare_mib: int) -> None:
    found = {(row["tier"], row["item"]): row for row in tables()["ledger"][key]["rows"]}
    total = found["gpu0", "total"]
    assert -NEAR_BYTES <= total["predicted_bytes"] - total["measured_bytes"] <= spare_mib * MIB
    weights = found["host", "weights"]
    assert weights["predicted_bytes"] == pytest.approx(weights["measured_bytes"], abs=0.1 * MIB)


@pytest.mark.parametrize("key", SPEEDS)
def test_speeds_and_memory_at_every_point(key: str) -> None:
    """Speeds are within the variation of a shared guest; the number that meet the targets is asserted below."""
    row: dict[str, Any] = tables()["speed"][key]
    over = row["vram_predicted"]["gpu0"] - row["vram"]["gpu0"]
    assert -NEAR_BYTES <= over <= (NEAR_BYTES if "224s" not in key else 124 * MIB)
    measured = row["measured"]
    assert row["before"]["decode"] == pytest.approx(measured["decode"], rel=DECODE_BEFORE + 0.03)
    assert row["after"]["decode"] == pytest.approx(measured["decode"], rel=DECODE_AFTER + 0.09)
    assert row["before"]["prefill"] == pytest.approx(measured["prefill"], rel=PREFILL)


def test_most_speeds_meet_their_targets() -> None:
    rows = list(tables()["speed"].values())
    later = [row for row in rows if row["axis"] != "first"]  # they are calibrated by the others

    def errors(rows: list[Row], when: str) -> list[float]:
        return [abs(row[when]["decode"] / row["measured"]["decode"] - 1) for row in rows]

    assert sum(error <= DECODE_BEFORE for error in errors(rows, "before")) >= 44
    assert len(later) == 40
    assert sum(error <= DECODE_AFTER for error in errors(later, "after")) >= 35


def test_rows_of_batches_and_the_digest_match_the_docs() -> None:
    """Checks the data only: rows replaced by those of another run must meet the targets, too."""
    batch, digest = read([FOLDER], "batch"), read([FOLDER], "digest")
    native = batch["one digest / native, tuned"]["tok_s"]
    assert native >= 1.8 * batch["one digest / -np 1"]["tok_s"]
    assert native >= 3 * batch["one digest / -np 32, untuned"]["tok_s"]
    shared = digest["shared"]
    assert shared["running"] == shared["sequences"] == 96
    assert shared["cached_least"] == shared["digest"] == 16384
    assert shared["vram_predicted"]["gpu0"] == pytest.approx(shared["vram"]["gpu0"], abs=NEAR_BYTES)
    assert digest["slots for all"]["outcome"] == "out of memory"
