"""Load progress never decreases and never exceeds the total; rate and remaining time follow from it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.loading.progress import (
    LoadProgress,
    LoadWork,
    Point,
    Sample,
    points,
    progress,
    since_growth,
    smoothed_rate,
)
from tokenmill.engine.logs import Hint
from tokenmill.units import GIB

READING = Hint("reading", None, "weights")


def shown(samples: Sequence[Sample], work: LoadWork) -> list[int]:
    return [point.bytes for point in points(samples, work)]


def test_nothing_seen() -> None:
    assert progress([], LoadWork(100)) == LoadProgress("starting", None, 100)
    assert progress([Sample(0.0)], LoadWork(None)) == LoadProgress("starting")


def test_pages_of_a_mapped_file_count_from_before_it_was_mapped() -> None:
    samples = [
        Sample(0.0, file_bytes=50, mapped=False),
        Sample(1.0, file_bytes=60, mapped=False),
        Sample(2.0, file_bytes=160, mapped=True, hint=READING),
        Sample(3.0, file_bytes=1060, mapped=True, hint=READING),
    ]
    assert shown(samples, LoadWork(2000)) == [100, 1000]
    found = progress(samples, LoadWork(2000))
    assert (found.phase, found.bytes_loaded, found.share, found.detail) == ("reading", 1000, 0.5, "weights")
    assert found.rate_bytes_s == pytest.approx(900)
    assert found.eta_s == pytest.approx(1000 / 900)


def test_reads_count_from_the_last_look_before_the_weights() -> None:
    starting = Hint("starting", None, "its processes")
    samples = [
        Sample(0.0, read_bytes=10, mapped=False),
        Sample(1.0, read_bytes=500, mapped=False, hint=starting),  # a program reads itself first
        Sample(2.0, read_bytes=700, mapped=False, hint=READING),
    ]
    assert shown(samples, LoadWork(1000)) == [0, 0, 200]


def test_without_any_word_reads_count_from_the_first_look() -> None:
    samples = [Sample(0.0, read_bytes=10), Sample(1.0, read_bytes=500), Sample(2.0, read_bytes=700)]
    assert shown(samples, LoadWork(1000)) == [0, 490, 690]


def test_what_is_copied_out_of_a_mapped_file_comes_on_top() -> None:
    samples = [
        Sample(0.0, file_bytes=0, mapped=False, anon_bytes=5),
        Sample(1.0, file_bytes=1000, mapped=True, anon_bytes=5),
        Sample(2.0, file_bytes=1000, mapped=True, anon_bytes=405),
        Sample(3.0, file_bytes=1000, mapped=True, anon_bytes=2005),
    ]
    assert shown(samples, LoadWork(1000, copied_bytes=800)) == [0, 1000, 1400, 1800]
    assert progress(samples[:3], LoadWork(1000, copied_bytes=800)).bytes_total == 1800


def test_memory_counts_where_reads_are_hidden() -> None:
    samples = [Sample(0.0, anon_bytes=100, vram_bytes=7), Sample(1.0, anon_bytes=400, vram_bytes=57)]
    assert shown(samples, LoadWork(1000)) == [0, 350]


def test_the_log_s_share_counts_where_it_is_more() -> None:
    samples = [Sample(0.0, read_bytes=0), Sample(1.0, read_bytes=100, hint=Hint("reading", 0.4, "weights"))]
    found = progress(samples, LoadWork(1000))
    assert (found.bytes_loaded, found.detail) == (400, "weights, 40%")


@pytest.mark.parametrize("phase", ["context", "compiling", "warming", "ready"])
def test_all_of_it_is_there_once_the_engine_is_past_it(phase: str) -> None:
    samples = [Sample(0.0, read_bytes=0), Sample(1.0, read_bytes=900, hint=Hint(phase))]  # type: ignore[arg-type]
    found = progress(samples, LoadWork(1000))
    assert (found.phase, found.bytes_loaded, found.eta_s) == (phase, 1000, 0.0)


def test_the_rate_of_a_finished_load_stays() -> None:
    samples = [Sample(float(second), read_bytes=min(1000, 100 * second)) for second in range(60)]
    assert progress(samples, LoadWork(1000)).rate_bytes_s == pytest.approx(100)


def test_a_stalled_load_has_no_end() -> None:
    samples = [Sample(float(second), read_bytes=100) for second in range(5)]
    found = progress(samples, LoadWork(1000))
    assert (found.rate_bytes_s, found.eta_s) == (0.0, None)


def test_since_growth() -> None:
    assert since_growth([]) == 0.0
    assert since_growth([Point(0, 5), Point(1, 9), Point(4, 9), Point(11, 9)]) == 10


def test_recent_bytes_weigh_more() -> None:
    slow_then_fast = [Point(float(s), s) for s in range(100)] + [Point(100.0 + s, 100 + 1000 * s) for s in range(1, 31)]
    rate = smoothed_rate(slow_then_fast)
    assert rate is not None
    assert 900 < rate < 1000


sizes = st.none() | st.integers(0, 2 * GIB)
hints = st.none() | st.builds(
    Hint,
    st.sampled_from(["starting", "reading", "context", "warming", "ready"]),
    st.none() | st.floats(0, 1),
    st.none(),
)
looks = st.lists(
    st.tuples(st.floats(0, 10), sizes, st.none() | st.booleans(), sizes, sizes, sizes, hints),
    min_size=1,
    max_size=30,
)


@given(looks, st.none() | st.integers(1, GIB), st.integers(0, GIB))
def test_invariants(
    taken: list[tuple[float, int | None, bool | None, int | None, int | None, int | None, Hint | None]],
    file_bytes: int | None,
    copied_bytes: int,
) -> None:
    work = LoadWork(file_bytes, copied_bytes)
    time_s, before = 0.0, 0
    samples: list[Sample] = []
    for span, pages, mapped, anon, read, vram, hint in taken:
        time_s += span
        samples.append(Sample(time_s, pages, mapped, anon, read, None, vram, None, hint))
        found = progress(samples, work)
        if found.bytes_loaded is not None:
            assert before <= found.bytes_loaded
            before = found.bytes_loaded
            assert work.total_bytes is None or found.bytes_loaded <= work.total_bytes
        assert found.share is None or 0 <= found.share <= 1
        assert found.rate_bytes_s is None or found.rate_bytes_s >= 0
        assert found.eta_s is None or found.eta_s >= 0


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, GIB)), min_size=2, max_size=30))
def test_the_rate_lies_between_the_slowest_and_the_fastest_stretch(steps: list[tuple[float, int]]) -> None:
    line, time_s, done = [], 0.0, 0
    for span, more in steps:
        time_s, done = time_s + span, done + more
        line.append(Point(time_s, done))
    rates = [(b.bytes - a.bytes) / (b.time_s - a.time_s) for a, b in pairwise(line)]
    rate = smoothed_rate(line)
    assert rate is not None
    assert min(rates) * 0.999 <= rate <= max(rates) * 1.001
