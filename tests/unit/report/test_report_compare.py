"""Bars of memories contain the whole ledger; predictions are paired with measurements."""

from dataclasses import replace
from functools import cache

import pytest

from support import reports
from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.report.bars import tier_chart
from tokenmill.report.compare import comparisons, load_for, pictures, typical_error
from tokenmill.report.report import FigureComparison, FigureOrigin
from tokenmill.units import GIB, MIB

CASES = [
    ("kimi-k2.5:Q4_K_S", "threadripper-pro-7965wx-2gpu"),  # does not fit
    ("gpt-oss-120b:MXFP4", "h200-1x"),
    ("qwen3-32b:Q4_K_M", "desktop-ddr5-3090"),
    ("llama-4-scout:Q4_K_M", "xeon-6246-optane"),
]


@cache
def planned(model: str, machine: str) -> Plan:
    return make(find(machine), read(model), Goal(context=8192))


@pytest.mark.parametrize(("model", "machine"), CASES)
def test_a_picture_holds_the_whole_ledger(model: str, machine: str) -> None:
    plan = planned(model, machine)
    found = pictures(plan, None)
    assert found
    for tier in found:
        assert tier.planned_bytes == plan.ledger.total(tier.name)
        dropped = sum(part.bytes for part in tier.planned if part.item == "page_cache")
        if plan.fits and tier.capacity_bytes is not None and tier.free_bytes is not None:
            assert tier.planned_bytes - dropped + tier.free_bytes == tier.capacity_bytes
    missing = {shortfall.tier: shortfall.missing_bytes for shortfall in plan.shortfalls}
    assert {tier.name: tier.missing_bytes for tier in found if tier.missing_bytes} == missing


@pytest.mark.parametrize("width", [356, 660])
@pytest.mark.parametrize(("model", "machine"), CASES)
def test_bars_stay_inside_their_drawing(model: str, machine: str, width: int) -> None:
    tiers = pictures(planned(model, machine), None)
    assert tiers
    for tier in tiers:
        drawn = str(tier_chart(tier, width))
        assert "<rect" in drawn
        assert f'viewBox="0 0 {width} ' in drawn
        for part in drawn.split("<rect")[1:]:
            values = dict(pair.split("=", 1) for pair in part.split("/>")[0].split() if "=" in pair)
            assert float(values["x"].strip('"')) + float(values["width"].strip('"')) <= width + 0.2


def test_the_last_load_with_its_own_prediction() -> None:
    given = reports.asked()
    assert given.plan is not None
    gpu, dram = pictures(given.plan, reports.load(given))
    assert gpu.loaded is not None
    assert [(part.item, part.bytes) for part in gpu.loaded.measured] == [
        ("weights", 57 * GIB),
        ("kv", 2 * GIB),
        ("compute", 1100 * MIB),
    ]
    assert gpu.loaded.predicted[2].bytes == 900 * MIB
    assert gpu.loaded.settings == "16 x 8192 tokens, ubatch 512, cache f16"
    assert dram.loaded is not None, "rows of the host belong to the memory that the CPU computes from"
    assert [part.item for part in dram.loaded.measured] == ["weights"], "figures of the kernel are not buffers"


def test_a_load_with_the_plans_own_settings_is_preferred() -> None:
    given = reports.asked()
    assert given.plan is not None
    alike = reports.load(given)
    other = replace(alike, when="2027-01-01T00:00:00+00:00", settings={"context": 4096, "sequences": 1})
    assert load_for(given.plan, [alike, other]) is alike
    assert load_for(given.plan, [other]) is other
    assert load_for(given.plan, []) is None


def test_every_pair_of_predicted_and_measured_is_compared() -> None:
    given = reports.asked()
    found = comparisons(reports.speeds(given), reports.load(given))
    sizes = {each.what: each for each in found if each.unit == "bytes"}
    compute = sizes["gpu0 compute, reported by the engine"]
    assert compute.error == pytest.approx(900 / 1100 - 1)
    assert sizes["host own, reported by the kernel"].why == "the plan allows the program itself 1.0 GiB"
    speeds = [each for each in found if each.unit == "tok/s"]
    assert len(speeds) == 5 + 2 * 9
    assert "32 sequences" in next(each.at for each in speeds if each.measured == 19.2)


def test_a_newer_measurement_takes_the_place_of_an_older_one() -> None:
    given = reports.asked()
    first = reports.speeds(given)[15]
    again = replace(first, when="2026-11-16T00:00:00+00:00", figures=replace(first.figures, decode_tok_s=50.0))
    (found,) = comparisons([first, again], None)
    assert (found.measured, found.origin.when) == (50.0, "2026-11-16T00:00:00+00:00")


def test_the_typical_error_is_the_median_absolute_error() -> None:
    def one(predicted: float, measured: float) -> FigureComparison:
        return FigureComparison("decode", "", "tok/s", predicted, measured, FigureOrigin("measured"))

    assert typical_error([one(90, 100), one(130, 100), one(100, 100)]) == pytest.approx(0.1)
    assert typical_error([one(1, 0)]) is None
