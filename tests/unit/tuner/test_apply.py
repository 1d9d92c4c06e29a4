"""An operating point fills in open settings and never changes specified ones."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.plans import placed, settings
from support.run_models import model
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Decision
from tokenmill.tuner.apply import Overlaid, circumstances, decided, misplaced, overlay
from tokenmill.tuner.point import Aim, Figures, OperatingPoint, PointScope, Trial, TrialSettings

DIALS = TrialSettings(13, 16, 12, 1024, 8192, "q8_0", "q8_0")
POINT = OperatingPoint(
    PointScope("mill", "a", "Small", "b", "native", "1"),
    Aim(),
    DIALS,
    Figures(jobs_tok_s=91.0),
    0.02,
    (),
    "",
    (),
    (Trial(DIALS, "measured"),),
    1,
    60.0,
    "2026-11-15T02:00:00+00:00",
)


def test_open_settings_are_filled_in_and_reported() -> None:
    laid = overlay(Goal(), POINT)
    goal = laid.goal
    assert (goal.threads, goal.threads_batch, goal.sequences, goal.ubatch, goal.context) == (13, 16, 12, 1024, 8192)
    assert (goal.cache_type_k, goal.cache_type_v) == ("q8_0", "q8_0")
    assert (goal.mmap, goal.repack) == (None, None), "only one value of each was ever tried"
    assert laid.words == (
        "operating point of 2026-11-15: 13 threads, 16 for prefill, 12 sequences, ubatch 1024, q8_0 cache,"
        " context 8192, measured 91 tok/s; use --no-point to ignore it"
    )
    assert {decision.name for decision in laid.decisions} >= {"threads", "sequences", "ubatch", "context"}
    assert all("operating point of 2026-11-15" in decision.reason for decision in laid.decisions)


SAID: list[tuple[str, Any]] = [
    ("threads", 4),
    ("threads_batch", 4),
    ("sequences", 2),
    ("ubatch", 128),
    ("context", 4096),
    ("cache_type_k", "f16"),
    ("cache_type_v", "f16"),
    ("mmap", False),
    ("repack", False),
]


@given(st.sets(st.sampled_from(range(len(SAID)))))
def test_specified_settings_are_never_changed(chosen: set[int]) -> None:
    said = dict(SAID[number] for number in chosen)
    laid = overlay(replace(Goal(), **said), POINT)
    assert {name: getattr(laid.goal, name) for name in said} == said
    names = {field.name for field in fields(Goal)}
    changed = {name for name in names if getattr(laid.goal, name) != getattr(replace(Goal(), **said), name)}
    assert changed.isdisjoint(said)


def test_figures_are_reported_only_if_the_whole_point_applies() -> None:
    laid = overlay(Goal(threads=4), POINT)
    assert laid.words is not None
    assert "measured" not in laid.words


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (Goal(cpu_only=True), "without --cpu-only"),
        (Goal(gpus=(0,)), "without --gpus"),
        (Goal(reserve_ram_bytes=1), "without --reserve-ram"),
        (Goal(gpu_margin_bytes=1 << 30), "without --margin 1073741824"),
        (Goal(own_fit=True, fit_margin_bytes=(1 << 30,)), "without --fit-margin"),
        (Goal(offload_min_batch=64), "unknown number of rows"),
        (Goal(reserve_cores=3), "--reserve-cores 3"),
        (Goal(context=16384), "8,192 tokens"),
    ],
)
def test_a_point_of_other_circumstances_is_not_used(goal: Goal, words: str) -> None:
    laid = overlay(goal, POINT)
    assert laid.goal == goal
    assert laid.words is None
    assert laid.why_not is not None
    assert words in laid.why_not


@pytest.mark.parametrize(("cores", "batch"), [(16, None), (19, 16)])
def test_reserved_cores_are_no_reason_where_the_point_leaves_them_free(cores: int, batch: int | None) -> None:
    laid = overlay(Goal(reserve_cores=3), POINT, cores=cores)
    assert (laid.goal.threads, laid.goal.sequences, laid.goal.threads_batch) == (13, 12, batch)
    assert overlay(Goal(reserve_cores=3), POINT, cores=15).why_not is not None
    assert overlay(Goal(reserve_cores=3, threads=4), POINT, cores=15).goal.sequences == 12


@pytest.mark.parametrize("goal", [Goal(cpu_only=True), Goal(gpus=(0, 2)), Goal(mlock=True, reserve_ram_bytes=1 << 30)])
def test_a_point_holds_under_the_options_it_was_found_with_and_no_others(goal: Goal) -> None:
    point = replace(POINT, under=circumstances(goal))
    assert overlay(goal, point).goal.sequences == 12
    assert overlay(Goal(), point).goal == Goal()
    assert "with --" in (overlay(Goal(), point).why_not or "")


def test_options_are_named_as_they_are_given() -> None:
    words = [
        overlay(Goal(), replace(POINT, under=circumstances(goal))).why_not
        for goal in (Goal(cpu_only=True), Goal(gpus=(0, 2)))
    ]
    assert [(text or "").rpartition(" with ")[2] for text in words] == ["--cpu-only", "--gpus 0,2"]


def test_the_offload_threshold_goes_with_the_point() -> None:
    point = replace(POINT, dials=replace(DIALS, offload_min_batch=128))
    laid = overlay(Goal(), point)
    assert laid.goal.offload_min_batch == 128
    assert "offload from 128 rows" in (laid.words or "")
    assert Decision("offload min batch", "128", laid.decisions[0].reason) in laid.decisions
    assert overlay(Goal(offload_min_batch=128), point).goal.sequences == 12
    assert "from 128 rows on" in (overlay(Goal(offload_min_batch=32), point).why_not or "")
    # decoding that many would reach it: the planner knows better
    assert overlay(Goal(sequences=128), point).goal.offload_min_batch is None
    assert overlay(Goal(sequences=127), point).goal.offload_min_batch == 128
    assert overlay(Goal(), POINT).goal.offload_min_batch is None, "of an old point it is unknown"


@pytest.mark.parametrize(
    ("sequences", "mmap", "rows"),
    [(None, None, 32), (224, None, 32), (224, False, 32), (16, None, 32), (40, None, None), (224, True, None)],
)
def test_a_point_beyond_its_threshold_holds_where_it_was_measured(
    sequences: int | None, mmap: bool | None, rows: int | None
) -> None:
    """With this many sequences from pinned memory; for fewer, or for a mapped file, the planner knows better."""
    point = replace(POINT, dials=replace(DIALS, sequences=224, offload_min_batch=32, mmap=False))
    goal = overlay(Goal(sequences=sequences, mmap=mmap), point).goal
    assert (goal.offload_min_batch, goal.sequences) == (rows, sequences or 224)


def test_a_threshold_that_was_tuned_under_is_no_other_circumstance() -> None:
    tuned = Goal(offload_min_batch=64)
    point = replace(POINT, dials=replace(DIALS, offload_min_batch=64), under=circumstances(tuned))
    assert point.under == ("--offload-min-batch=64",)
    assert overlay(Goal(), point).goal.offload_min_batch == 64


@pytest.mark.parametrize(
    ("cards", "resident", "then", "words"),
    [
        (0, 0, "plan", None),
        (1, 0, "experts dram, rest gpu0", None),
        (1, 0, "plan", "uses gpu0"),
        (1, 61, "experts dram, rest gpu0", "with experts gpu0"),
        (0, 0, "experts dram, rest gpu0", "without a GPU"),
    ],
)
def test_a_point_holds_for_a_placement_like_its_own(cards: int, resident: int, then: str, words: str | None) -> None:
    plan = placed(model("kimi-k2.5:Q4_K_S"), settings(), cards=cards, resident=range(resident))
    laid = overlay(Goal(), replace(POINT, dials=replace(DIALS, placement=then)))
    why, warnings = misplaced(plan, laid), decided(plan, laid).warnings
    if words is None:
        assert (why, warnings) == (None, ())
    else:
        assert words in (why or "")
        assert [why in warning for warning in warnings if why] == [True]
    assert misplaced(plan, Overlaid(Goal())) is None, "no point is in force"


def test_flash_attention_is_not_taken_away_from_a_quantized_cache() -> None:
    plain = replace(DIALS, flash_attention=False, cache_type_k="f16", cache_type_v="f16")
    point = replace(POINT, dials=plain)
    assert overlay(Goal(), point).goal.flash_attention is False
    assert overlay(Goal(cache_type_v="q8_0"), point).goal.flash_attention is True


def test_what_needs_a_load_is_taken_where_it_was_tried_both_ways() -> None:
    other = replace(DIALS, mmap=False)
    point = replace(POINT, dials=other, trials=(Trial(DIALS, "measured"), Trial(other, "measured")))
    assert overlay(Goal(), point).goal.mmap is False
    assert overlay(Goal(), point).goal.repack is None


def test_nothing_is_reported_if_every_setting_is_specified() -> None:
    said = {name: value for name, value in SAID if name != "context"}
    laid = overlay(replace(Goal(context=4096), **said), POINT)
    assert (laid.words, laid.decisions, laid.why_not) == (None, (), None)


def test_a_plan_names_the_point_where_it_decided() -> None:
    plan = placed(model("llama-3.3-70b:Q4_K_M"), settings())
    plan = replace(plan, decisions=(Decision("threads", "16", "16 physical cores"), Decision("placement", "all", "x")))
    shown = {decision.name: decision.reason for decision in decided(plan, overlay(Goal(), POINT)).decisions}
    assert shown["threads"].startswith("operating point")
    assert shown["placement"] == "x"
