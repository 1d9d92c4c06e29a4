"""Parses and formats bytes, rates, counts and ranges of numbers.

Memory and file sizes are binary (GiB), bandwidth (GB/s) and parameter counts (1.03 T) are decimal.
"""

import re
from collections.abc import Iterable

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "ki": KIB,
    "kib": KIB,
    "mi": MIB,
    "mib": MIB,
    "gi": GIB,
    "gib": GIB,
    "ti": TIB,
    "tib": TIB,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:[._][0-9]+)*)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Parse `24 GiB`, `128GB`, `512m` or `1024`; ValueError names the accepted units."""
    match = _QUANTITY.fullmatch(text)
    factor = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; use a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    number = match[1].replace("_", "")
    return int(number) * factor if number.isdigit() else round(float(number) * factor)


def format_bytes(count: int) -> str:
    """`538.8 GiB`: binary units with one decimal."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # GiB up to 10 TiB, so that sizes of models are easy to compare
        if abs(count) >= size * (10 if unit == "TiB" else 1):
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_count(count: float) -> str:
    """`1.03 T`, `31.5 B`, `135 M`: parameter counts."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {suffix}"
    return f"{count:g}"


def number_of(count: int, noun: str, nouns: str | None = None) -> str:
    """`1 job`, `1,200 jobs`; `nouns` is an irregular plural."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def format_gb_s(rate: float) -> str:
    """`614 GB/s`: decimal, as vendors and STREAM report it."""
    return f"{rate:.0f} GB/s" if rate >= 100 else f"{rate:.1f} GB/s"


def format_bytes_s(rate: float) -> str:
    """`1.2 GB/s`, `350 MB/s`: bytes per second, decimal."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def format_percent(share: float) -> str:
    """`93 %`, `0.3 %`: one decimal below 10 %."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def format_tok_s(rate: float) -> str:
    """`1,330` or `7.42`: tokens per second, without the unit."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_seconds(seconds: float) -> str:
    """`42 s`, `7 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def parse_ranges(text: str) -> tuple[int, ...]:
    """Parse the kernel's lists of CPUs and NUMA nodes: `0-3,8,10-11`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-3,8,10-11`: numbers in ascending order, as the kernel, taskset and systemd write lists of CPUs and nodes."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
