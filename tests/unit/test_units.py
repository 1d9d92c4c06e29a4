import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.units import (
    GIB,
    MIB,
    format_bytes,
    format_count,
    format_gb_s,
    format_percent,
    format_ranges,
    format_seconds,
    number_of,
    parse_bytes,
    parse_ranges,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1024", 1024),
        ("24 GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24Gi", 24 * GIB),
        ("128GB", 128 * 10**9),
        (" 1.5 MiB ", 3 * MIB // 2),
        ("512m", 512 * 10**6),
        ("1_000 B", 1000),
        ("1 TiB", 1024 * GIB),
    ],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "24 gigs", "1e3", "1 GiB of it", "∞"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_exact_bytes_survive(count: int) -> None:
    assert parse_bytes(f"{count} B") == count


@given(st.integers(1, 1 << 50))
def test_formatted_bytes_read_back_to_a_twentieth_of_the_unit(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (538.8 * GIB, "538.8 GiB"), (2000 * GIB, "2000.0 GiB")],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(int(count)) == text


def test_other_formats() -> None:
    assert format_count(1.0265e12) == "1.03 T"
    assert format_count(31.5e9) == "31.5 B"
    assert format_count(134_515_008) == "135 M"
    assert format_count(7) == "7"
    assert format_gb_s(614.4) == "614 GB/s"
    assert format_gb_s(14.25) == "14.2 GB/s"
    assert [format_seconds(s) for s in (0.5, 42, 420, 12_600)] == ["0.5 s", "42 s", "7 min", "3.5 h"]


def test_one_of_a_thing_and_several() -> None:
    assert [number_of(count, "job") for count in (0, 1, 2, 1200)] == ["0 jobs", "1 job", "2 jobs", "1,200 jobs"]
    assert number_of(2, "entry", "entries") == "2 entries"


def test_shares_below_ten_percent_have_a_decimal() -> None:
    assert [format_percent(share) for share in (0.0, 0.003, 0.0994, 0.0996, 0.93, 1.0)] == [
        "0 %",
        "0.3 %",
        "9.9 %",
        "10 %",
        "93 %",
        "100 %",
    ]


@given(st.sets(st.integers(0, 300)))
def test_ranges_read_back(numbers: set[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == tuple(sorted(numbers))


def test_ranges_are_sorted_and_short() -> None:
    assert format_ranges([3, 1, 2, 7, 9, 8, 3]) == "1-3,7-9"
    assert format_ranges((0, 10, 11)) == "0,10-11"
