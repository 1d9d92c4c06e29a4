"""The forecast on published runs of machines that its constants were not fitted on."""

from functools import cache, partial

import pytest
from bench.forecast import all_points
from bench.forecast_score import (
    CLASSES,
    Point,
    Score,
    by_formula,
    coverage,
    errors,
    is_held_out,
    predict,
    quantile,
    score,
)

from tokenmill.planner.speed.rates import standard, table


@cache
def held_out(kind: str, machines: str = "all") -> tuple[Point, ...]:
    return tuple(
        point
        for point in everything()
        if point.held_out and point.figure.kind == kind and machines in ("all", point.machine_class)
    )


@cache
def everything() -> tuple[Point, ...]:
    return tuple(all_points())


def forecast_score(kind: str, machines: str = "all") -> Score:
    found = score(errors(held_out(kind, machines), partial(predict, rates=standard())))
    assert found is not None
    return found


def test_machines_are_divided_and_none_is_on_both_sides() -> None:
    groups = {point.figure.group for point in everything()}
    held = {group for group in groups if is_held_out(group)}
    assert len(held) >= 14
    assert len(groups - held) >= 20


def test_decode_on_held_out_machines() -> None:
    found = forecast_score("decode")
    assert found.median <= 0.18
    assert found.p90 <= 0.42


def test_prefill_on_held_out_machines() -> None:
    found = forecast_score("prefill")
    assert found.median <= 0.28
    assert found.p90 <= 0.95


@pytest.mark.parametrize("machines", CLASSES)
@pytest.mark.parametrize("share", [1.0, 0.55])
def test_median_beats_both_formulas_in_every_class(machines: str, share: float) -> None:
    formula = score(errors(held_out("decode", machines), partial(by_formula, share=share)))
    assert formula is not None
    assert forecast_score("decode", machines).median < formula.median


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_ranges_hold_about_four_fifths_of_all_runs(kind: str) -> None:
    found = coverage([point for point in everything() if point.figure.kind == kind], standard(), table().ranges)
    assert found is not None
    assert 0.75 <= found <= 0.90


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_ranges_hold_on_held_out_machines(kind: str) -> None:
    found = coverage(held_out(kind), standard(), table().ranges)
    assert found is not None
    assert 0.75 <= found <= 0.92


def test_quantile_counts_weights() -> None:
    assert quantile([1.0, 2.0, 9.0], [1.0, 1.0, 8.0], 0.5) == 9.0
    assert quantile([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0.5) == 2.0
