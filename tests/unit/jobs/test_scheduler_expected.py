"""Expected answers, rates and times, and the shape of engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Capabilities, EngineKind, Identity, Usage
from tokenmill.jobs.models import QueuedJob
from tokenmill.jobs.scheduler.costs import RECOMPUTE_LENGTHS_UNKNOWN, RECOMPUTE_WITHOUT_RATES, EngineCosts
from tokenmill.jobs.scheduler.estimates import (
    ASSUMED_TOKENS_PER_BYTE,
    AnswerLengths,
    MeasuredRates,
    RemainingWork,
    eta_s,
)
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.prefix_tree import PrefixTree
from tokenmill.jobs.scheduler.shape import DEFAULT_SLOTS, EngineShape, Reuse, shape_of

HEAD, OTHER = b"headtail", b"elsewise"
RATES = MeasuredRates(1000.0, ((2, 100.0), (4, 180.0), (8, 200.0)))


def finished(
    lengths: AnswerLengths, tokens: int, *, head: bytes = HEAD, ceiling: int | None = None, times: int = 1
) -> None:
    for _ in range(times):
        lengths.finished(Pending(1, head, 2000, max_tokens=ceiling), Usage(600, tokens, 450))


def test_the_ceiling_is_all_that_is_known_at_first() -> None:
    lengths = AnswerLengths()
    assert lengths.expect(HEAD, None) is None
    assert lengths.expect(HEAD, 256) == 256
    assert lengths.mean_tokens is None
    assert lengths.tokens_per_byte == ASSUMED_TOKENS_PER_BYTE
    assert lengths.remaining(10) is None


def test_jobs_of_a_kind_are_expected_alike_once_a_few_have_finished() -> None:
    lengths = AnswerLengths()
    finished(lengths, 10, times=40)
    finished(lengths, 200, head=OTHER, times=40)
    assert lengths.mean_tokens == 105
    assert lengths.expect(HEAD, None) == pytest.approx(18.6, abs=0.1)
    assert lengths.expect(OTHER, None) == pytest.approx(191.4, abs=0.1)
    assert lengths.expect(OTHER, 50) == 50, "never above the ceiling"
    assert lengths.expect(b"newwhead", None) == 105
    assert lengths.tokens_per_byte == 0.3


def test_short_prompts_are_told_apart_by_their_ceiling() -> None:
    lengths = AnswerLengths()
    finished(lengths, 10, head=b"one_", ceiling=20, times=50)
    finished(lengths, 300, head=b"two_", ceiling=400, times=50)
    short, long = lengths.expect(b"new1", 20), lengths.expect(b"new2", 400)
    assert short is not None
    assert long is not None
    assert short <= 20 < 280 < long


def test_kinds_that_were_used_long_ago_are_forgotten() -> None:
    lengths = AnswerLengths()
    for number in range(3000):
        finished(lengths, 10, head=number.to_bytes(4, "big") + b"tail")
    assert len(lengths._kinds) == 1024
    assert lengths.mean_tokens == 10


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.none() | st.integers(1, 400))
def test_an_expectation_lies_among_what_was_seen(tokens: list[int], ceiling: int | None) -> None:
    lengths = AnswerLengths()
    for count in tokens:
        finished(lengths, count, ceiling=ceiling)
    expected = lengths.expect(HEAD, ceiling)
    assert expected is not None
    assert min(*tokens, ceiling or 500) - 1e-9 <= expected <= min(max(tokens), ceiling or 500) + 1e-9


def test_a_record_is_made_of_what_the_store_has() -> None:
    waiting = QueuedJob(7, -3, HEAD + b"ide", 900, 64, 50.0, 0, 0)
    assert AnswerLengths().pending(waiting) == Pending(7, HEAD, 900, 64, 3, 50.0, 64)
    assert AnswerLengths().pending(waiting, deadline_s=40.0).deadline_s == 40.0
    assert AnswerLengths().pending(waiting._replace(deadline_s=None, max_tokens=None)) == Pending(7, HEAD, 900, None, 3)


@pytest.mark.parametrize(
    ("slots", "rate"), [(1, None), (2, 100.0), (3, 140.0), (4, 180.0), (6, 190.0), (8, 200.0), (64, 200.0)]
)
def test_rates_between_measured_widths(slots: int, rate: float | None) -> None:
    assert RATES.decode_at(slots) == rate
    assert MeasuredRates().decode_at(slots) is None


@pytest.mark.parametrize(
    ("left", "rates", "expected_s"),
    [
        (RemainingWork(5000, 3600), RATES, 5 + 20),
        (RemainingWork(0, 3600), MeasuredRates(None, ((4, 180.0),)), 20),
        (RemainingWork(5000, 0), MeasuredRates(1000.0), 5),
        (RemainingWork(5000, 3600), MeasuredRates(None, ((4, 180.0),)), None),
        (RemainingWork(5000, 3600), MeasuredRates(1000.0), None),
        (RemainingWork(0, 0), MeasuredRates(), 0),
    ],
)
def test_the_time_that_is_left(left: RemainingWork, rates: MeasuredRates, expected_s: float | None) -> None:
    assert eta_s(left, rates, 4) == expected_s


def test_what_is_left_is_like_what_was_done() -> None:
    lengths = AnswerLengths()
    finished(lengths, 20)
    finished(lengths, 40)
    assert lengths.remaining(10) == RemainingWork(1500, 300), "450 of 600 prompt tokens were reused"


def group(jobs: int, output: float | None) -> PrefixTree:
    tree = PrefixTree()
    for job in range(jobs):
        tree.add(Pending(job, HEAD + bytes([job] * 4), 4000, output))
    return tree


@pytest.mark.parametrize(
    ("jobs", "output", "rates", "pays", "assumed"),
    [
        (10, None, MeasuredRates(), False, RECOMPUTE_LENGTHS_UNKNOWN),
        (10, 99.0, MeasuredRates(), False, RECOMPUTE_WITHOUT_RATES),  # 990 tokens for two slots, the head has 500
        (10, 101.0, MeasuredRates(), True, RECOMPUTE_WITHOUT_RATES),
        (10, 99.0, MeasuredRates(1000.0, ((1, 50.0), (2, 51.0))), False, None),  # 0.4 s gained, 0.5 s paid
        (10, 99.0, MeasuredRates(1000.0, ((1, 50.0), (2, 60.0))), True, None),
        (10, 99.0, MeasuredRates(10.0, ((1, 50.0), (2, 60.0))), False, None),  # 50 s for the head
        (10, 99.0, MeasuredRates(1000.0, ((1, 50.0), (2, 40.0))), False, None),
    ],
)
def test_when_a_head_is_computed_again(
    jobs: int, output: float | None, rates: MeasuredRates, pays: bool, assumed: str | None
) -> None:
    costs = EngineCosts(EngineShape("slots", 2, 2, rates=rates), AnswerLengths())
    assert costs.recompute_pays(group(jobs, output).root, 2000, at=1, busy=1) == (pays, assumed)


def test_answers_that_came_count_more_than_ceilings() -> None:
    lengths = AnswerLengths()
    finished(lengths, 5, ceiling=1000)
    costs = EngineCosts(EngineShape("slots", 2, 2), lengths)
    assert costs.recompute_pays(group(10, 1000.0).root, 2000, at=1, busy=1)[0] is False


def test_a_job_takes_its_share_of_the_engine_and_a_slot_for_longer() -> None:
    costs = EngineCosts(EngineShape("shares", 4, rates=RATES), AnswerLengths())
    assert costs.seconds(Pending(1, HEAD, 4000, 90.0, max_tokens=90), 4) == (1.5, 3.0)
    assert costs.seconds(Pending(1, HEAD, 4000), 4) is None
    assert EngineCosts(EngineShape("shares", 4), AnswerLengths()).seconds(Pending(1, HEAD, 4000, 90.0), 4) is None
    assert costs.tokens(4000) == 1000
    assert [costs.output(Pending(1, HEAD, 4000, 90.0)), costs.output(Pending(2, HEAD, 4000))] == [90.0, None]


def capabilities(
    *, shares: bool = False, keeps: bool = False, slots: bool = False, counts: bool = True
) -> Capabilities:
    return Capabilities(
        shares_prefixes=shares,
        keeps_prefixes=keeps,
        chooses_slots=slots,
        interactive_first=False,
        pins_prefixes=False,
        saves_prefixes=False,
        changes_threads=False,
        changes_context=False,
        reports_cached_tokens=counts,
        grammar=True,
        json_schema=True,
        logit_bias=True,
        tools_parsed=True,
        max_logprobs=20,
    )


def identity(kind: EngineKind, slots: int | None) -> Identity:
    return Identity(kind, "model", "id", "build", 4096, slots, "address")


@pytest.mark.parametrize(
    ("can", "kind", "slots", "width", "reuse", "at_once", "ahead"),
    [
        (capabilities(shares=True, keeps=True), "native", 8, None, "shares", 8, 8),
        (capabilities(shares=True, keeps=True), "native", 8, 3, "shares", 3, 3),
        (
            capabilities(),
            "native",
            8,
            None,
            "none",
            8,
            8,
        ),  # an architecture that cannot, or slots with cells of their own
        (capabilities(keeps=True, slots=True), "llama-server", 4, None, "slots", 4, 0),
        (capabilities(keeps=True, slots=True), "ik_llama", 4, 2, "slots", 2, 0),
        (capabilities(keeps=True, slots=True), "llama-server", 4, 16, "slots", 4, 0),
        (capabilities(keeps=True), "llama-server", None, None, "prefix cache", DEFAULT_SLOTS, 0),
        (capabilities(shares=True, keeps=True), "vllm", None, 32, "prefix cache", 32, 0),
        (capabilities(), "url", None, None, "prefix cache", DEFAULT_SLOTS, 0),
        (capabilities(counts=False), "url", None, 2, "none", 2, 0),
    ],
)
def test_the_shape_of_an_engine(
    can: Capabilities, kind: EngineKind, slots: int | None, width: int | None, reuse: Reuse, at_once: int, ahead: int
) -> None:
    shape = shape_of(can, identity(kind, slots), width=width, cells_total=9000, rates=RATES)
    assert (shape.reuse, shape.width, shape.look_ahead, shape.cells_total) == (reuse, at_once, ahead, 9000)
    assert shape.slots == (slots if reuse == "slots" else None)
    assert shape.rates is RATES
    assert len(shape.notes) == 1 + (width is None and slots is None) + (width is not None and width > (slots or 99))


def test_reuse_slots_needs_the_number_of_slots() -> None:
    with pytest.raises(ValueError, match="slots"):
        EngineShape("slots", 4)
