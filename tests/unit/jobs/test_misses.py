"""Why less was reused than expected."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Usage
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.worker.reuse import (
    SLOT_SIMILARITY,
    Cause,
    Evidence,
    Miss,
    Misses,
    difference,
    expected_tokens,
    explain,
    tolerance_tokens,
)

SENT = Dispatch(7, None, 4096, 1024, leader=False, source_job=3)
PINNED = replace(SENT, slot=2)
PROMPT_BYTES = 5000
DIGEST = b"The digest. " * 400
USAGE = Usage(1250, 40, 0)  # a token for four bytes: 1024 were expected

CASES: list[tuple[Dispatch, Evidence, Cause, tuple[str, ...]]] = [
    (SENT, Evidence("shares", restarted=True), "engine restarted", ()),
    (SENT, Evidence("none", notes=("the model is recurrent",)), "cannot reuse", ("(the model is recurrent)",)),
    (PINNED, Evidence("slots", slot=5), "slot taken", ("slot 2", "slot 5")),
    (SENT, Evidence("shares", evicted_tokens=812), "evicted", ("812",)),
    (SENT, Evidence("prefix cache", cells_between=9000, cells_total=4096), "evicted", ("9000", "4096")),
    (SENT, Evidence("prefix cache", cells_between=900, cells_total=4096), "unknown", ("chat template",)),
    (PINNED, Evidence("slots", slot=2, similarity=0.9), "unknown", ()),  # a requested slot is used
    (SENT, Evidence("slots", similarity=0.85), "below similarity", ("82%", "85%", "--slot-prompt-similarity")),
    (SENT, Evidence("slots", similarity=SLOT_SIMILARITY), "unknown", ()),
]


@pytest.mark.parametrize(("sent", "evidence", "cause", "named"), CASES)
def test_causes(sent: Dispatch, evidence: Evidence, cause: Cause, named: tuple[str, ...]) -> None:
    miss = explain(sent, USAGE, PROMPT_BYTES, evidence)
    assert miss is not None
    assert (miss.cause, miss.job, miss.at_byte) == (cause, 7, None)
    assert all(each in miss.message for each in named)
    assert miss.lost_tokens == miss.expected_tokens == 1024


def test_a_changed_prefix_is_shown_at_its_byte() -> None:
    source = DIGEST[:1000] + "Dokument vom 12.\tMärz 2026, 08:15 Uhr\n".encode() + DIGEST
    prompt = DIGEST[:1000] + "Dokument vom 12.\tMärz 2026, 09:40 Uhr\n".encode() + DIGEST
    miss = explain(SENT, Usage(1250, 40, 250), len(prompt), Evidence("shares", prompt=prompt, source_prompt=source))
    assert miss is not None
    assert miss.cause == "prefix changed"
    assert miss.at_byte == 1030
    assert miss.message.splitlines()[1:] == [
        r"  was  Dokument vom 12.\tMärz 2026, 0▸8:15 Uhr\nThe digest. The diges",
        r"  is   Dokument vom 12.\tMärz 2026, 0▸9:40 Uhr\nThe digest. The diges",
    ]


def test_texts_that_agree_are_not_the_cause_and_say_how_much_was_to_be_found() -> None:
    prompt, source = DIGEST[:4600] + b"A" * 400, DIGEST[:4600] + b"B" * 300
    evidence = Evidence("shares", prompt=prompt, source_prompt=source, notes=("a note",))
    assert expected_tokens(SENT, USAGE, 5000, evidence) == 1150
    miss = explain(SENT, Usage(1250, 40, 500), 5000, evidence)
    assert miss is not None
    assert miss.cause == "unknown"
    assert "up to about byte 2000: " in miss.message
    assert miss.message.endswith("(a note)")


@pytest.mark.parametrize(
    ("cached", "block", "missed"),
    [
        (1024, 1, False),
        (2000, 1, False),
        (1024 - 16 - 102, 1, False),  # sixteen tokens, and a tenth
        (1024 - 16 - 102 - 1, 1, True),
        (1024 - 16 - 102 - 1, 32, False),  # reuse comes in blocks
        (0, 32, True),
        (None, 1, False),  # the engine does not say
    ],
)
def test_a_few_tokens_less_are_no_miss(cached: int | None, block: int, missed: bool) -> None:
    found = explain(SENT, Usage(1250, 40, cached), PROMPT_BYTES, Evidence("shares", block_tokens=block))
    assert (found is not None) is missed


def test_nothing_expected_is_nothing_missed() -> None:
    assert explain(replace(SENT, expected_bytes=0), USAGE, PROMPT_BYTES, Evidence("shares")) is None
    assert explain(SENT, Usage(0, 0, 0), 0, Evidence("shares")) is None
    assert tolerance_tokens(0) == 16


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_a_difference_is_one_line_each_whatever_the_texts(head: str, one: str, other: str) -> None:
    texts = (head + one).encode(), (head + other).encode()
    at = len(head.encode())
    for shown in difference(*texts, at):
        assert shown.count("▸") >= 1
        assert shown.isprintable()
        assert len(shown) <= 2 * 30 * 10 + 1


def test_a_difference_inside_a_character_shows_the_character() -> None:
    assert difference("aé".encode(), "aè".encode(), 2) == ("a▸é", "a▸è")


def test_a_tally_keeps_what_was_lost_and_a_few_examples() -> None:
    misses = Misses()
    for job in range(10):
        misses.add(Miss(job, "evicted", f"words {job}", 100, 40))
    misses.add(Miss(11, "slot taken", "once", 5000, 0))
    assert misses.lost_tokens == 5600
    assert [(each.cause, each.jobs, each.lost_tokens) for each in misses.by_cost()] == [
        ("slot taken", 1, 5000),
        ("evicted", 10, 600),
    ]
    assert [miss.job for miss in misses.by_cost()[1].examples] == [0, 1, 2]
    assert misses.lines() == [
        "slot taken: 5,000 prompt tokens computed again in 1 job; once",
        "evicted: 600 prompt tokens computed again in 10 jobs; words 0",
    ]
    assert Misses().lines() == []
