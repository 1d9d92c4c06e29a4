"""Corrections of a forecast by recorded runs."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.placement import fingerprint
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import Calibration, Correction
from tokenmill.tuner.calibrate import MAX_FACTOR, calibration, correction, main_family, newest_builds, predicted
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings

DIALS = TrialSettings(threads=13, threads_batch=16, sequences=1, ubatch=512, context=8192)
NOTHING = Figures()
MODEL = "llama-3.3-70b:Q4_K_M"


@cache
def plan_on(machine: Machine) -> Plan:
    return make(machine, read(MODEL), Goal(context=8192, sequences=1, cpu_only=True))


EPYC = find("epyc-9175f")
SILENT = replace(EPYC, dram=replace(EPYC.dram, mts=None, nominal_gb_s=None))  # states no bandwidth


def speed(
    figures: Figures,
    *,
    machine: Machine = EPYC,
    when: str = "2026-11-15T10:00:00+00:00",
    model_id: str = "own",
    build: str = "b2",
    engine: str = "native",
    dials: TrialSettings = DIALS,
    depth: int = 512,
    told: Figures = NOTHING,
) -> SpeedRecord:
    return SpeedRecord(
        when, machine.name, machine_id(machine), "model", model_id, engine, build, "tune", dials, depth, figures, told
    )


def found(*speeds: SpeedRecord, machine: Machine = EPYC, **more: object) -> Calibration | None:
    given_with = {"model_id": "own", "engines": ("native",), **more}
    return calibration(speeds, plan_on(machine), machine_id=machine_id(machine), **given_with)  # type: ignore[arg-type]


def decode_of(calibrated: Calibration | None) -> Correction:
    assert calibrated is not None
    assert calibrated.decode is not None
    return calibrated.decode


@pytest.mark.parametrize("machine", [EPYC, SILENT], ids=["bandwidth stated", "no bandwidth"])
def test_one_run_puts_the_same_settings_on_the_measurement(machine: Machine) -> None:
    ran = speed(Figures(decode_tok_s=3.1, prefill_tok_s=28.0), machine=machine)
    made = found(ran, machine=machine)
    now = predicted(plan_on(machine), ran, made)
    assert now.decode_tok_s == pytest.approx(3.1, rel=0.01)
    assert now.prefill_tok_s == pytest.approx(28.0, rel=0.01)


@pytest.mark.parametrize("machine", [EPYC, SILENT], ids=["bandwidth stated", "no bandwidth"])
@pytest.mark.parametrize("measured", [1.5, 6.0])
def test_other_settings_move_the_same_way(machine: Machine, measured: float) -> None:
    before = found(speed(Figures(decode_tok_s=3.5), machine=machine), machine=machine)
    after = found(speed(Figures(decode_tok_s=measured), machine=machine), machine=machine)
    for dials, depth in ((replace(DIALS, threads=8), 0), (replace(DIALS, sequences=8), 512), (DIALS, 4096)):
        other = speed(Figures(), machine=machine, dials=dials, depth=depth)
        first = predicted(plan_on(machine), other, before).decode_tok_s
        then = predicted(plan_on(machine), other, after).decode_tok_s
        assert first is not None
        assert then is not None
        assert (then < first) == (measured < 3.5)


def test_the_plan_says_what_it_was_corrected_by() -> None:
    made = found(speed(Figures(decode_tok_s=3.1)), speed(Figures(decode_tok_s=3.2), when="2026-11-16T10:00:00+00:00"))
    plan = plan_on(EPYC)
    again = make(plan.machine, plan.profile, plan.goal, calibration=made)
    assert {one.confidence for one in again.forecast.decode} == {"calibrated"}
    assert {one.confidence for one in again.forecast.prefill} == {"estimated"}
    (decision,) = (one for one in again.decisions if one.name == "decode forecast")
    assert decision.reason.startswith("2 measurements of this model")
    assert "2026-11-16" in decision.reason
    assert decision.reason in " ".join(again.forecast.notes)


def test_a_memory_that_states_no_rate_gets_one_from_decoding_alone() -> None:
    plan = plan_on(SILENT)
    assert not plan.forecast.decode
    made = found(speed(Figures(decode_tok_s=3.1), machine=SILENT), machine=SILENT)
    assert made is not None
    size = plan.profile.bytes / 1e9
    assert made.tier_gb_s["dram"] > 3.1 * size  # reading is not all it waits for
    again = make(plan.machine, plan.profile, plan.goal, calibration=made)
    assert {one.confidence for one in (*again.forecast.decode, *again.forecast.prefill)} == {"calibrated"}


def test_prefill_alone_says_nothing_of_memory() -> None:
    assert found(speed(Figures(prefill_tok_s=30.0), machine=SILENT), machine=SILENT) is None


@pytest.mark.parametrize(
    "other",
    [
        {"build": "b1", "when": "2026-11-14T10:00:00+00:00"},
        {"engine": "vllm"},
        {"machine": find("epyc-7763")},
        {"dials": replace(DIALS, placement="experts on the cards")},
    ],
    ids=["an older build", "another engine", "another machine", "another placement"],
)
def test_what_does_not_count(other: dict[str, object]) -> None:
    counts, odd = Figures(decode_tok_s=3.1), Figures(decode_tok_s=30.0)
    assert found(speed(odd, **other), speed(counts)) == found(speed(counts))  # type: ignore[arg-type]


def test_the_middle_decides_not_the_mean() -> None:
    factors = [decode_of(found(speed(Figures(decode_tok_s=tok_s)))).factor for tok_s in (3.0, 3.1, 3.2)]
    three = decode_of(found(*(speed(Figures(decode_tok_s=tok_s)) for tok_s in (3.0, 3.1, 0.5, 3.2, 40.0))))
    assert three.factor == pytest.approx(factors[1])
    assert three.measurements == 5


def test_more_of_the_same_is_surer() -> None:
    spreads = [decode_of(found(*[speed(Figures(decode_tok_s=3.1))] * count)).spread for count in (1, 4, 16)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > 0.03


def test_other_models_speak_until_this_one_does() -> None:
    told = Figures(decode_tok_s=10.0)
    others = [speed(Figures(decode_tok_s=8.0), model_id="b", told=told)] * 3
    far = decode_of(found(*others))
    assert far.factor == pytest.approx(1.25)
    assert far.of == "another model"
    near = decode_of(found(*others, families={"b": "linear"}))
    assert near.of == "another model with weights of the same kind"
    assert near.spread < far.spread
    own = decode_of(found(*others, speed(Figures(decode_tok_s=3.1)), families={"b": "linear"}))
    assert (own.of, own.measurements) == ("this model", 1)


def test_only_the_first_predictions_of_others_count() -> None:
    raw = [speed(Figures(decode_tok_s=5.0), model_id="b", told=Figures(decode_tok_s=10.0))] * 10
    later = [
        speed(Figures(decode_tok_s=5.0), model_id="b", told=Figures(decode_tok_s=5.0), when="2026-11-16T10:00:00+00:00")
    ] * 30
    assert decode_of(found(*later, *raw)).factor == pytest.approx(2.0)


def test_nothing_recorded_is_no_calibration() -> None:
    assert found() is None
    assert found(speed(Figures())) is None
    assert found(speed(Figures(decode_tok_s=8.0), model_id="b"), model_id=None) is None


def test_newest_builds_are_those_of_each_engine() -> None:
    kept = newest_builds(
        [
            speed(Figures(), when="3", build="b2"),
            speed(Figures(), when="1", build="b1"),
            speed(Figures(), when="2", build="v1", engine="vllm"),
        ]
    )
    assert [(one.engine, one.build) for one in kept] == [("vllm", "v1"), ("native", "b2")]


def test_the_kind_of_most_bytes_names_a_model() -> None:
    assert main_family({"F32": 10, "Q4_K": 400, "Q6_K": 300, "IQ3_S": 600}) == "linear"
    assert main_family({}) is None


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_a_correction_is_bounded(ratios: list[float]) -> None:
    made = correction(ratios, expected=0.05, of="this model")
    assert 1 / MAX_FACTOR - 1e-9 <= made.factor <= MAX_FACTOR + 1e-9
    assert min(*ratios, MAX_FACTOR) - 1e-9 <= made.factor or made.factor == pytest.approx(1 / MAX_FACTOR)
    assert 0 < made.spread < 3


@given(st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=9), st.floats(1.01, 3.0))
def test_a_slower_machine_never_raises_a_forecast(rates: list[float], slower: float) -> None:
    made = [
        correction([10.0 / rate * by for rate in rates], expected=0.05, of="this model").factor for by in (1.0, slower)
    ]
    assert made[1] >= made[0]


@cache
def hybrid() -> Plan:
    return make(EPYC, read("kimi-k2.5:Q4_K_S"), Goal(context=8192, sequences=1))


HYBRID = fingerprint(hybrid().profile, hybrid().placement)


@pytest.mark.parametrize(
    ("plan", "where", "counts"),
    [
        (hybrid(), HYBRID, True),
        (hybrid(), "plan", False),
        (hybrid(), "experts gpu0, rest gpu0", False),
        (plan_on(EPYC), "plan", True),
        (plan_on(EPYC), HYBRID, False),
    ],
)
@pytest.mark.parametrize("model_id", ["own", "other"])
def test_runs_with_weights_elsewhere_do_not_count(plan: Plan, where: str, counts: bool, model_id: str) -> None:
    told = Figures(decode_tok_s=6.0)
    ran = speed(Figures(decode_tok_s=3.0), dials=replace(DIALS, placement=where), model_id=model_id, told=told)
    made = calibration([ran], plan, machine_id=machine_id(EPYC), model_id="own", engines=("native",))
    assert (made is not None) is counts


def test_runs_are_held_against_the_threshold_that_they_had() -> None:
    def said(rows: int | None) -> float:
        dials = replace(DIALS, sequences=48, offload_min_batch=rows, placement=HYBRID)
        return predicted(hybrid(), speed(Figures(), dials=dials)).decode_tok_s or 0.0

    assert said(None) == said(128) > 2 * said(32)
