"""What is said to whoever has jobs without an answer: only what can help."""

import pytest

from tokenmill.jobs.worker.retries import needed, remedies

RETRY = "tokenmill retry batch_1 --failed, then the same command"


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({}, []),
        ({"engine_died": 2}, [f"to try again: {RETRY}"]),
        ({"engine_failed": 1, "failed": 1}, [f"to try again: {RETRY}"]),
        (
            {"invalid_line": 1, "refused": 2},
            ["3 lines cannot be run: mend the file and run it; no answer is computed again"],
        ),
        ({"too_long": 4}, [f"4 too long: {RETRY} with a larger --context"]),
        ({"timeout": 1}, [f"1 not done in time: {RETRY} with a longer --job-timeout"]),
        (
            {"deadline": 9, "engine_died": 1},
            [
                "9 given up at the deadline: the same command with a later --deadline",
                f"to try the other one again: {RETRY}",
            ],
        ),
    ],
)
def test_each_cause_has_its_remedy(codes: dict[str, int], said: list[str]) -> None:
    assert remedies(codes, "batch_1") == said


def test_before_another_try_it_is_said_what_must_change() -> None:
    assert needed({"engine_died": 3}) == []
    assert needed({"too_long": 1, "invalid_line": 1}) == [
        "1 line cannot be run: mend the file and run it; no answer is computed again",
        "1 too long: give a larger --context",
    ]
