"""Plans with a GPU against what a CUDA build of llama.cpp projected for them on an H200.

Recorded by bench/gpu/verify_plans.py; the card is planned for as if it had 12, 24, 48 or 139 GiB.
"""

import json
from pathlib import Path

import pytest
from verify_plans import plans

from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.memory.costs import MemoryCosts
from tokenmill.planner.plan import Item, Plan
from tokenmill.units import MIB

ROOT = Path(__file__).parents[3]
RECORDED = json.loads((ROOT / "docs" / "validation" / "h200-dry-run.json").read_text())["plans"]
MODELS = list(dict.fromkeys(row["model"] for row in RECORDED))
ITEMS: dict[str, tuple[Item, ...]] = {"compute": ("compute", "staging"), "weights": ("weights",), "kv": ("kv",)}
RUNTIME_BYTES = 512 * MIB  # the estimate when the plans were recorded; another one would shift layers


def predicted_mib(plan: Plan, where: str, item: str) -> float:
    rows = plan.ledger.full_context
    return sum(r.bytes for r in rows if r.tier.startswith("gpu") == (where != "host") and r.item in ITEMS[item]) / MIB


@pytest.mark.parametrize("model", MODELS)
def test_every_buffer_as_the_engine_projects_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryCosts, "runtime", lambda *_: RUNTIME_BYTES)
    recorded = {row["plan"]: row["projected_mib"] for row in RECORDED if row["model"] == model}
    made = dict(plans(read(model), find("h200-1x")))
    assert recorded.keys() <= made.keys()
    for what, projected in recorded.items():
        # the number of host layers has changed since, because the recording improved the estimates
        divided = "host kv" in projected
        for key, mib in projected.items():
            where, item = key.split()
            found = predicted_mib(made[what], where, item)
            if item == "compute" and divided:
                assert found == pytest.approx(mib, rel=0.05, abs=64), (what, key)
            elif item == "compute":
                assert found == pytest.approx(mib, abs=0.3), (what, key)
            elif not divided:
                assert found == pytest.approx(mib, rel=0.001, abs=0.1), (what, key)
