"""Lines of an expansion: equal in every run, different for different jobs."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.openai.call import check
from tokenmill.recipes.expansion.lines import (
    MIN_PART,
    ExpandPrompts,
    ExpansionJob,
    SamplingOptions,
    jobs_of,
    part_lines,
)
from tokenmill.recipes.expansion.prompts import load_prompt
from tokenmill.recipes.expansion.seeds import Example, Parent, Shape
from tokenmill.recipes.expansion.transforms import WAYS, Variant

PAIR = Shape("output", "instruction", parts=("instruction", "output"))
THREE = (Variant("paraphrase"), Variant("harder"), Variant("language", "de"))
PARENTS = [Parent(f"seed-{number}", f"seed-{number}", 0, Example(f"Task {number}", "", "Done.")) for number in range(4)]


def desk(shape: Shape = PAIR, **drawing: float) -> ExpandPrompts:
    return ExpandPrompts(shape, {way: load_prompt(way) for way in WAYS}, SamplingOptions(**drawing))  # type: ignore[arg-type]


def asked(jobs: Iterable[ExpansionJob]) -> set[tuple[str, Variant, int]]:
    return {(job.parent.id, job.variant, job.turn) for job in jobs}


def test_lines_are_valid_requests() -> None:
    for job in jobs_of(PARENTS, [*THREE, Variant("instruction")], None, 0):
        line = desk().line(job)
        call = check("chat", line["body"])
        assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
        assert call.values["max_tokens"] == 512
        assert ("json_schema" in call.values) == (job.variant.way != "instruction")
    plain = desk(Shape("text")).line(ExpansionJob(PARENTS[0], THREE[0], 0))
    assert "response_format" not in plain["body"]


def test_the_language_is_named_and_the_seed_comes_last() -> None:
    text = desk().line(ExpansionJob(PARENTS[0], THREE[2], 0))["body"]["messages"][-1]["content"]
    assert "Write it in German" in text
    assert text.endswith("Instruction:\nTask 0\n\nOutput:\nDone.")


def test_names_differ_and_repeat() -> None:
    jobs = [job for before in range(3) for job in jobs_of(PARENTS, THREE, None, before)]
    names = [desk().line(job)["custom_id"] for job in jobs]
    assert len(set(names)) == len(jobs) == 36
    assert names == [desk().line(job)["custom_id"] for job in jobs]
    other = [desk(seed=1).line(job)["custom_id"] for job in jobs]
    assert not set(names) & set(other)


def test_equal_seeds_have_equal_jobs_under_two_names() -> None:
    twin = Parent("twin", "twin", 0, PARENTS[0].example)
    one, two = (desk().line(ExpansionJob(parent, THREE[0], 0)) for parent in (PARENTS[0], twin))
    assert one["body"] == two["body"]
    assert one["custom_id"] != two["custom_id"]


def test_seeds_differ_by_round_and_way() -> None:
    seeds = {desk().seed(ExpansionJob(PARENTS[0], variant, turn)) for variant in THREE for turn in range(5)}
    assert len(seeds) == 15
    assert all(0 <= seed < 1 << 31 for seed in seeds)


@pytest.mark.parametrize("per_parent", [None, 1, 2, 3, 5])
def test_rounds_use_all_ways_in_turn(per_parent: int | None) -> None:
    rounds = [list(jobs_of(PARENTS, THREE, per_parent, before)) for before in range(6)]
    assert {len(jobs) for jobs in rounds} == {len(PARENTS) * (per_parent or len(THREE))}
    jobs = [job for one in rounds for job in one]
    assert len(asked(jobs)) == len(jobs)  # no line occurs twice
    for parent in PARENTS:
        ways = Counter(job.variant for job in jobs if job.parent == parent)
        assert max(ways.values()) - min(ways.values()) <= 1
    first = rounds[0][: len(PARENTS)]
    assert [job.parent for job in first] == PARENTS  # each parent once before any parent twice
    assert all(one.variant != two.variant for one, two in pairwise(first))


def test_more_of_each_seed_begins_with_the_same_jobs() -> None:
    few, many = (asked(jobs_of(PARENTS, THREE, each, 0)) for each in (3, 6))
    assert few < many


@given(st.integers(0, 100_000), st.integers(1, 100_000))
def test_sizes_of_parts(before: int, lines: int) -> None:
    left, asked, parts = lines, before, list[int]()
    while left:
        parts.append(part_lines(asked, left))
        assert parts[-1] <= max(MIN_PART, asked // 4) * 3 // 2
        asked, left = asked + parts[-1], left - parts[-1]
    assert sum(parts) == lines
    assert all(part >= MIN_PART for part in parts[:-1])
    assert len(parts) == 1 or parts[-1] > MIN_PART // 2
    assert len(parts) < 40


def test_ways_that_do_not_apply_are_left_out() -> None:
    variants = (Variant("paraphrase"), Variant("instruction"))
    no_answer = Parent("a", "a", 0, Example("Task"))
    no_task = Parent("b", "b", 0, Example(answer="Text."))
    assert [(job.parent.id, job.variant.way) for job in jobs_of([no_answer, no_task], variants, None, 0)] == [
        ("a", "paraphrase"),
        ("b", "instruction"),
        ("b", "paraphrase"),
    ]
    assert list(jobs_of([no_answer], variants[1:], 4, 0)) == []
