"""Which health check results make a backend down, and which bring it back."""

import pytest

from tokenmill.gateway.backends.health_check import HealthHistory, ProbeResult

UP, LOADING, LATE, REFUSED = "up", "loading", "late", "refused"


@pytest.mark.parametrize(
    ("findings", "condition"),
    [
        ((), "up"),
        ((REFUSED,), "up"),
        ((REFUSED, REFUSED), "down"),
        ((REFUSED, UP, REFUSED), "up"),
        ((LATE, LATE), "up"),
        ((LATE, LATE, LATE), "down"),
        ((LATE, LATE, REFUSED), "down"),
        ((REFUSED, REFUSED, REFUSED, UP), "up"),
        ((REFUSED, REFUSED, LOADING), "loading"),
        ((LOADING, REFUSED), "loading"),
        ((LOADING, UP), "up"),
        ((REFUSED, REFUSED, LATE), "down"),
    ],
)
def test_conditions(findings: tuple[ProbeResult, ...], condition: str) -> None:
    history = HealthHistory()
    for finding in findings:
        history = history.add(finding)
    assert history.condition == condition
