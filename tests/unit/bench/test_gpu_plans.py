"""The plans of the proof on the machine it was written for: what is where, and what is predicted at their points."""

from dataclasses import replace
from pathlib import Path

import pytest
from prove_batch import NATIVE, WAYS, Work, bare, counted, plan_of, program, warm_lines
from prove_digest import FULL, goal_of, most_slots, server_plan, shared_plan
from prove_plans import (
    ALL,
    CARD_12,
    CARD_24,
    CARDS,
    EXPERTS,
    HALF,
    TAIL,
    Case,
    calibrated,
    cases,
    forecast,
    ledger_at,
    points,
    seconds_for,
)
from prove_slice import head
from prove_tune import Tuning, command, config_text, trials_made

from tokenmill import measurements
from tokenmill.config import EngineConfig
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine, Measurements, Rate
from tokenmill.model.describe import describe
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.tuner.point import Figures

RATES = (Rate("dram", 200.0, 16, {1: 12.0, 4: 48.0, 16: 200.0}), Rate("gpu0", 4300.0), Rate("dram->gpu0", 50.0))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return replace(find("h200-1x"), measured=Measurements("2026-11-15T00:00:00+00:00", RATES))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return describe((head().header,))


@pytest.fixture(scope="module")
def found(machine: Machine, profile: Profile) -> dict[str, Case]:
    return {case.name: case for case in cases(machine, profile)}


@pytest.fixture
def work(machine: Machine, profile: Profile, tmp_path: Path) -> Work:
    dials = {
        "threads": 14,
        "threads_batch": 16,
        "sequences": 24,
        "ubatch": 1024,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
    }
    return Work(machine, profile, Path("/opt/llama-server"), dials, tmp_path, tiny=False)


def expert_layers_on_card(case: Case) -> int:
    homes = zip(case.plan.profile.tensors, case.plan.placement.homes, strict=True)
    return len({t.layer for t, home in homes if t.cls is TensorClass.ROUTED_EXPERTS and home.startswith("gpu")})


def test_five_plans_that_fit_with_experts_where_they_are_said_to_be(found: dict[str, Case]) -> None:
    assert {name: expert_layers_on_card(case) for name, case in found.items()} == {
        EXPERTS: 0,
        ALL: 4,
        CARD_24: 1,
        CARD_12: 0,
        HALF: 2,
    }
    assert all(case.plan.fits for case in found.values())


@pytest.mark.parametrize("name", [CARD_24, CARD_12])
def test_a_small_card_holds_its_plan_with_room_to_spare(found: dict[str, Case], name: str) -> None:
    case = found[name]
    assert case.card_bytes == CARDS[name]
    taken = sum(row.bytes for row in case.plan.ledger.full_context if row.tier == "gpu0" and row.item != "reserve")
    assert taken <= CARDS[name]


def test_points_begin_with_the_one_that_calibrates_and_are_never_the_same_twice(found: dict[str, Case]) -> None:
    for case in found.values():
        some = points(case, 16)
        assert some[0].axis == "first"
        assert sum(point.axis == "first" for point in some) == 1
        assert len({point.name for point in some}) == len(some)
    assert {point.axis for point in points(found[EXPERTS], 16)} == {"first", "threads", "ubatch", "depth", "sequences"}
    assert all(
        point.threads <= 8 or point.threads == found[EXPERTS].plan.settings.threads
        for point in points(found[EXPERTS], 8)
        if point.axis == "threads"
    )


def test_a_point_has_a_forecast_a_ledger_and_a_price(found: dict[str, Case]) -> None:
    for case in found.values():
        for point in points(case, 16):
            said = forecast(case.plan, point)
            assert said.decode_tok_s
            assert said.prefill_tok_s
            assert 5 < seconds_for(point, said) < 120
            assert point.dials(case.plan).context > point.head + TAIL
    wide = ledger_at(found[EXPERTS].plan, points(found[EXPERTS], 16)[2])
    assert wide.of("gpu0", "kv") != found[EXPERTS].plan.ledger.of("gpu0", "kv")


def test_one_run_at_the_first_point_corrects_the_others_by_as_much(found: dict[str, Case]) -> None:
    case = found[EXPERTS]
    first, other, *_ = points(case, 16)
    said = forecast(case.plan, first)
    assert said.decode_tok_s
    assert said.prefill_tok_s
    figures = Figures(said.decode_tok_s / 2, said.prefill_tok_s * 2)
    known = calibrated(case, first, figures, machine_id="m", model_id="x", when="2026-11-15T00:00:00+00:00")
    assert known is not None
    plain, corrected = forecast(case.plan, other), forecast(case.plan, other, known)
    assert plain.decode_tok_s
    assert plain.prefill_tok_s
    assert corrected.decode_tok_s == pytest.approx(plain.decode_tok_s / 2, rel=0.01)
    assert corrected.prefill_tok_s == pytest.approx(plain.prefill_tok_s * 2, rel=0.01)


def test_without_a_card_two_plans_go_the_same_way(machine: Machine, profile: Profile) -> None:
    some = cases(machine, profile, tiny=True)
    assert [case.plan.settings.mmap for case in some] == [False, True]
    assert not any(case.plan.placement.gpus for case in some)
    assert points(some[0], 2, tiny=True)[0].axis == "first"


def test_every_way_of_a_batch_has_its_experts_in_host_memory(work: Work) -> None:
    plans = {way: plan_of(work, way) for way in (NATIVE, *WAYS)}
    assert all(expert_layers_on_card(Case(way, plan)) == 0 for way, plan in plans.items())
    assert {way: plan.settings.sequences for way, plan in plans.items()} == {NATIVE: 24, **WAYS}
    assert (plans[NATIVE].settings.threads, plans[NATIVE].settings.ubatch) == (14, 1024)
    untuned = plans["-np 32, untuned"].settings
    assert (untuned.threads, untuned.ubatch, untuned.mmap) == (16, 512, True)


def test_an_untuned_server_does_not_hear_of_the_offload_threshold(work: Work) -> None:
    assert program(work, untuned=False) == work.server
    script = program(work, untuned=True)
    assert "unset GGML_OP_OFFLOAD_MIN_BATCH" in script.read_text()
    assert script.stat().st_mode & 0o100


def test_slots_are_warmed_with_the_digest_and_questions_of_their_own() -> None:
    lines = [{"messages": [{"role": "system", "content": "digest"}, {"role": "user", "content": "one"}]}]
    warm = warm_lines(lines, 3)
    assert [line["messages"][0]["content"] for line in warm] == ["digest"] * 3
    assert len({line["messages"][1]["content"] for line in warm} | {"one"}) == 4
    assert [message["content"] for message in bare(lines[0])["messages"]] == ["one"]


@pytest.mark.parametrize(
    ("text", "found_"),
    [
        ('data: {"timings": {"predicted_n": 7, "prompt_n": 40}}', (7, 40)),
        ('data: {"choices": []}', None),
        ("data: [DONE]", None),
        ("", None),
    ],
)
def test_tokens_are_counted_as_the_server_counts_them(text: str, found_: tuple[int, int] | None) -> None:
    assert counted(text) == found_


def test_shared_cells_hold_more_sequences_than_slots_would(work: Work) -> None:
    slots = most_slots(work, FULL)
    assert slots is not None
    assert 8 < slots < FULL.sequences
    assert not server_plan(work, FULL, slots + 1).fits
    assert not server_plan(work, FULL, FULL.sequences).fits
    assert shared_plan(work, FULL).fits
    assert FULL.cells < 2 * FULL.digest
    assert goal_of(work, FULL).gpu_margin_bytes > 0
    assert most_slots(replace(work, tiny=True), FULL) is None


def test_the_tuning_is_a_command_that_anyone_can_give(machine: Machine, tmp_path: Path) -> None:
    config = EngineConfig(library="/b/libllama.so", header="/b/llama.h")
    tuning = Tuning(Path("slice.gguf"), machine, tmp_path / "m.toml", config, tmp_path, tiny=False)
    words = command(tuning, tmp_path / "c.toml", 9)
    assert words[1:5] == ["-m", "tokenmill", "tune", "slice.gguf"]
    assert words[words.index("--trials") + 1] == "9"
    assert int(words[words.index("--margin") + 1]) > 100 << 30
    assert 'library = "/b/libllama.so"' in config_text(tuning)
    assert trials_made(tmp_path) == 0
    for _ in range(2):
        measurements.append(tmp_path, "trial", {})
    assert trials_made(tmp_path) == 2
