"""Remedies for failed jobs: the options and commands that are suggested."""

import pytest

from tokenmill.jobs.worker.retries import needed, remedies

RETRY = "tokenmill retry batch_1 --failed"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({}, []),
        ({"engine_died": 2}, [(RETRY,)]),
        ({"engine_failed": 1, "failed": 1}, [(RETRY,)]),
        ({"invalid_line": 1, "refused": 2}, [("3 lines", "file")]),
        ({"too_long": 4}, [("4 too long", RETRY, "--context")]),
        ({"timeout": 1}, [("1 timed out", RETRY, "--job-timeout")]),
        ({"deadline": 9, "engine_died": 1}, [("9 ", "--deadline"), ("other one", RETRY)]),
        ({"timeout": 1, "engine_died": 2}, [("1 timed out", RETRY, "--job-timeout"), ("other 2", RETRY)]),
    ],
)
def test_each_cause_has_its_remedy(codes: dict[str, int], expected: list[tuple[str, ...]]) -> None:
    found = remedies(codes, "batch_1")
    assert [all(part in remedy for part in parts) for remedy, parts in zip(found, expected, strict=True)] == [
        True
    ] * len(expected), found


def test_a_command_that_retries_by_itself_and_a_line_that_cannot_run_need_no_retry() -> None:
    assert not any(RETRY in remedy for remedy in remedies({"deadline": 1, "invalid_line": 1}, "batch_1"))


def test_changes_needed_before_another_retry() -> None:
    assert needed({"engine_died": 3}) == []
    lines, context = needed({"too_long": 1, "invalid_line": 1})
    assert "1 line " in lines
    assert "1 too long" in context
    assert "--context" in context
