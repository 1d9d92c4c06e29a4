"""The limits of a step follow the plan."""

import os
from dataclasses import astuple, replace

import pytest

from support.plans import placed, settings
from tokenmill.model.read import read
from tokenmill.native.step_limits import ReadWatch, predicted_step_s, step_limits
from tokenmill.planner.plan import Forecast, Plan, Speed


def plan(decode_s: float | None, prefill_s: float | None) -> Plan:
    """A plan whose longest decode and prefill steps are predicted to take so long."""
    made = placed(read("qwen3-32b:Q4_K_M"), settings(sequences=4, ubatch=512))
    decode = [] if decode_s is None else [_speed(4 / decode_s, 8192, None), _speed(400 / decode_s, 0, None)]
    prefill = [] if prefill_s is None else [_speed(512 / prefill_s, 6144, 512), _speed(1.0, 0, 256)]
    return replace(made, forecast=Forecast(tuple(decode), tuple(prefill), None, None, None))


def _speed(tok_s: float, depth: int, ubatch: int | None) -> Speed:
    return Speed(tok_s, depth, 4, (), "estimated", ubatch=ubatch)


@pytest.mark.parametrize(
    ("decode_s", "prefill_s", "configured_s", "limits"),
    [
        (0.01, 0.2, None, (5.0, 30.0, 5.0, 30.0)),
        (0.5, 20.0, None, (82.0, 246.0, 5.0, 30.0)),
        (0.5, 20.0, 60.0, (60.0, 60.0, 5.0, 60.0)),
        (0.01, 0.2, 600.0, (5.0, 600.0, 5.0, 600.0)),
        (0.01, 0.2, 2.0, (2.0, 2.0, 2.0, 2.0)),
        (None, None, None, (60.0, 600.0, 5.0, 30.0)),
        (0.5, None, None, (60.0, 600.0, 5.0, 30.0)),
    ],
)
def test_limits(
    decode_s: float | None, prefill_s: float | None, configured_s: float | None, limits: tuple[float, ...]
) -> None:
    found = step_limits(plan(decode_s, prefill_s), configured_s)
    assert astuple(found) == pytest.approx(limits)


def test_the_longest_step_counts() -> None:
    assert predicted_step_s(plan(0.5, 20.0)) == pytest.approx(20.5)
    assert predicted_step_s(plan(None, 20.0)) is None


def test_a_process_without_new_page_faults_does_not_read() -> None:
    assert ReadWatch(None).since_read_s() == float("inf")
    watch = ReadWatch(os.getpid())
    assert watch.since_read_s() == float("inf")  # the first check knows no earlier count
    watch._faults = -1
    assert watch.since_read_s() < 1.0
