"""Plans and forecasts against an H200 that ran them: five layers of Kimi-K2.5, rows of bench/gpu/prove.py.

The rows lie in docs/validation; what is predicted is what the present version says of the same plans.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prove_again import Again, slice_profile
from prove_judge import DECODE_AFTER, DECODE_BEFORE, PREFILL
from prove_rows import Row, read

from tokenmill.hardware import machine_file
from tokenmill.units import MIB

FOLDER = Path(__file__).parents[3] / "docs" / "validation" / "h200-kimi-slice"
LEDGERS, SPEEDS = read([FOLDER], "ledger"), read([FOLDER], "speed")
PLANNED = [key for key in LEDGERS if not key.startswith("llama-server")]
NEAR_BYTES = 4 * MIB  # the driver counts in 2 MiB


@cache
def tables() -> dict[str, dict[str, Row]]:
    """All rows, predicted anew."""
    again = Again(machine_file.read(FOLDER / "machine.toml"), slice_profile())
    return again.tables({"ledger": LEDGERS, "speed": SPEEDS})


def test_rows_are_there() -> None:
    assert len(PLANNED) == 5
    assert len(SPEEDS) == 26


@pytest.mark.parametrize("key", PLANNED)
def test_every_item_on_the_card_is_as_planned(key: str) -> None:
    items = {row["item"]: row for row in tables()["ledger"][key]["rows"] if row["tier"] == "gpu0"}
    assert items.keys() == {"weights", "kv", "compute", "runtime", "total"}
    for name, row in items.items():
        near = NEAR_BYTES if name in ("runtime", "total") else 0.1 * MIB
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], abs=near), name


@pytest.mark.parametrize("key", ["llama-server, np1", "llama-server, np32"])
def test_a_server_takes_what_its_largest_batch_needs(key: str) -> None:
    """-np 1 was given 1049 tokens at once and not the 2048 that it may be given: its pool is smaller than planned."""
    total = next(row for row in tables()["ledger"][key]["rows"] if (row["tier"], row["item"]) == ("gpu0", "total"))
    spare = (2048 - 1049) * 63 * 1024 if key.endswith("np1") else 0
    assert total["predicted_bytes"] - spare == pytest.approx(total["measured_bytes"], abs=NEAR_BYTES)


@pytest.mark.parametrize("key", SPEEDS)
def test_speeds_and_memory_at_every_point(key: str) -> None:
    row: dict[str, Any] = tables()["speed"][key]
    assert row["vram_predicted"]["gpu0"] == pytest.approx(row["vram"]["gpu0"], abs=NEAR_BYTES)
    measured = row["measured"]
    assert row["before"]["decode"] == pytest.approx(measured["decode"], rel=DECODE_BEFORE)
    assert row["after"]["decode"] == pytest.approx(measured["decode"], rel=DECODE_AFTER)
    assert row["before"]["prefill"] == pytest.approx(measured["prefill"], rel=PREFILL)
