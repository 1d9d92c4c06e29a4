"""Agreement of two readings."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.tuner.qualify.agreement import Place, TextReading, compare, divergence
from tokenmill.tuner.qualify.result import MAX_KL, agreed

Top = tuple[tuple[bytes, float], ...]


def top(**shares: float) -> Top:
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return tuple((name.encode(), math.log(share)) for name, share in ranked)


def reading(*tops: Top, tokens: tuple[int, ...] = (1, 2, 3)) -> TextReading:
    places = (Place("prose", at, one, one[0][1] if one else None) for at, one in enumerate(tops))
    return TextReading(True, (tokens,), tuple(places))


def test_the_same_distribution_does_not_diverge() -> None:
    one = top(a=0.5, b=0.3, c=0.1)
    assert divergence(one, one) == 0.0


def test_the_divergence_is_that_of_whole_distributions_where_all_is_known() -> None:
    ours, theirs = top(a=0.6, b=0.4), top(a=0.2, b=0.8)
    assert divergence(theirs, ours) == pytest.approx(0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4), abs=1e-9)


def test_what_the_other_does_not_tell_counts_as_little() -> None:
    assert divergence(top(a=0.9), top(b=0.9)) > 2
    assert divergence(top(a=0.9), top(b=0.9)) > divergence(top(a=0.5), top(b=0.5))


@st.composite
def tops(draw: st.DrawFn) -> Top:
    """Distributions over a few tokens, of which only the most likely are reported."""
    weights = draw(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=12))
    told = draw(st.integers(1, len(weights)))
    names = draw(st.permutations([f"t{number}" for number in range(12)]))
    total = sum(weights)
    return top(**{names[at]: weight / total for at, weight in enumerate(sorted(weights, reverse=True)[:told])})


@given(tops(), tops())
def test_a_divergence_is_finite_and_never_negative(one: Top, other: Top) -> None:
    assert 0.0 <= divergence(one, other) < 60
    assert divergence(one, one) == pytest.approx(0.0, abs=1e-6)


def test_agreement_in_figures() -> None:
    same, other = top(a=0.9, b=0.1), top(b=0.6, a=0.4)
    found = compare(reading(*[same] * 9, other), reading(*[same] * 10))
    assert found.positions == 10
    assert found.same_top == pytest.approx(0.9)
    assert found.kl_max == pytest.approx(divergence(same, other))
    assert found.kl_mean == pytest.approx(found.kl_max / 10)
    assert found.kl_p95 <= found.kl_max
    assert found.worst[0][0].position == 9
    assert found.perplexity_reference == pytest.approx(1 / 0.9)
    check = agreed(found)
    assert check.good == (found.kl_mean <= MAX_KL)
    assert [failure.asked for failure in check.failures] == ["prose, position 9"]


@pytest.mark.parametrize(
    ("reference", "code"),
    [
        (reading(top(a=1.0), tokens=(1, 2)), "vocabulary_mismatch"),
        (replace(reading(top(a=1.0)), by_token=False), "position_mismatch"),
        (reading(()), "position_mismatch"),
    ],
)
def test_what_cannot_be_compared_is_refused(reference: TextReading, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        compare(reading(top(a=1.0)), reference)
    assert caught.value.code == code
