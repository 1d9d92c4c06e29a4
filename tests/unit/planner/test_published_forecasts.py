"""Every published run is forecast, or a fact of its machine is missing; none fails."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from support.published_runs import figures_of
from support.runs import CASES, predicted

RECORDS: list[Mapping[str, Any]] = [
    record
    for name in ("public_runs_2.json", "public_runs_3.json")
    for record in json.loads((CASES / name).read_text(encoding="utf-8"))["runs"]
]


def test_most_records_are_forecast() -> None:
    """Not yet: unified memory, KTransformers, models whose shape is not listed."""
    assert sum(any(True for _ in figures_of(record)) for record in RECORDS) >= 95


@pytest.mark.parametrize("record", [pytest.param(record, id=record["id"]) for record in RECORDS])
def test_record_is_forecast_unless_a_fact_is_missing(record: Mapping[str, Any]) -> None:
    for figure in figures_of(record):
        tok_s = predicted(figure)
        if tok_s is None:
            assert figure.kind == "prefill" or not record["bandwidth_known"], (figure.kind, figure.depth)
        else:
            assert math.isfinite(tok_s)
            assert figure.low / 10 < tok_s < figure.high * 10, (figure.kind, figure.depth, tok_s)
