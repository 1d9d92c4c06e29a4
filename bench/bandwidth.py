"""Memory bandwidth as `tokenmill probe --measure` reports it, compared with mbw and a STREAM-like C program.

    python bench/bandwidth.py [--rounds 15] [--seconds 0.3]

tokenmill and the peers alternate in the same run, on the same cores and with the same amount of memory. Each round
keeps the best tenth of a second of each; the result is the median of the rounds' ratios, because the speed of a shared
host changes from second to second. All count a copied byte once. The C program (bandwidth_peer.c, built with gcc -O3
-march=native) is the peer for reading, and for copying with several threads. mbw is the peer for copying with one
thread, by the better of its methods MEMCPY and DUMB (version 1.2.2 swaps the names: DUMB calls memcpy). Exits 1 if a
checked ratio is outside 0.85..1.15, and 2 without a peer. Writes results/bandwidth.json.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from tokenmill.hardware.bandwidth.measure import free_bytes, measure, usable_cores
from tokenmill.hardware.bandwidth.memory import slice_bytes, working_set_bytes
from tokenmill.hardware.bandwidth.threads import thread_counts
from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost
from tokenmill.hardware.machine import Machine
from tokenmill.units import MIB, format_bytes

HERE = Path(__file__).parent
LOWEST = 0.85
HIGHEST = 1.15
REPEATS = 3  # repeats of a tenth of a second per round, of which the best is kept

Figures = dict[tuple[str, str, int], list[float]]
"""GB/s of each round, by program, path and threads."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A line of the table."""

    path: str
    threads: int | None  # None: the best number for each side
    peer: str
    ours_gb_s: float  # medians of the rounds
    peer_gb_s: float
    ratio: float  # median of the rounds' ratios, tokenmill over the peer
    checked: bool

    @property
    def within(self) -> bool:
        """Whether the ratio is within 15 %."""
        return LOWEST <= self.ratio <= HIGHEST


def build_peer(folder: Path) -> Path | None:
    """The C program, compiled for this machine; None without a compiler."""
    if shutil.which("gcc") is None:
        return None
    program = folder / "bandwidth_peer"
    source = HERE / "bandwidth_peer.c"
    subprocess.run(["gcc", "-O3", "-march=native", "-pthread", "-o", program, source], check=True)
    return program


def find_mbw() -> str | None:
    """Path of mbw, which is installed first if this process may do so."""
    if shutil.which("mbw") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "mbw"], check=False, stdout=subprocess.DEVNULL)
    return shutil.which("mbw")


def run_peer(program: Path, kind: str, size_bytes: int, cpus: tuple[int, ...]) -> float:
    """Best repeat of the C program, in GB/s."""
    command = [str(program), kind, str(size_bytes), str(REPEATS), *map(str, cpus)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(map(float, output.split()))


def run_mbw(program: str, size_bytes: int, cpu: int) -> float:
    """Best run of mbw's two plain methods, in GB/s."""
    rates = []
    for method in ("-t0", "-t1"):
        command = ["taskset", "-c", str(cpu), program, "-n", "10", method, str(size_bytes // MIB)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rates += re.findall(r"^\d+\s.*Copy: ([\d.]+) MiB/s", output, re.MULTILINE)
    return max(map(float, rates)) * MIB / 1e9


def play_round(
    machine: Machine, total_bytes: int, seconds: float, peer: Path | None, mbw: str | None, *, ours_first: bool
) -> Iterator[tuple[str, str, int, float]]:
    """Measure once with every program; yields (program, path, threads, GB/s)."""
    cores = usable_cores(machine)

    def ours() -> Iterator[tuple[str, str, int, float]]:
        for rate in measure(machine, seconds=seconds * len(thread_counts(len(cores)))).rates:
            for threads, gb_s in rate.by_threads.items():
                yield "ours", rate.path, threads, gb_s

    def peers() -> Iterator[tuple[str, str, int, float]]:
        for threads in thread_counts(len(cores)):
            size = slice_bytes(total_bytes, threads)
            if peer:
                yield "C", "dram", threads, run_peer(peer, "read", size, cores[:threads])
                yield "C", "dram->dram", threads, run_peer(peer, "copy", size, cores[:threads])
        if mbw:
            yield "mbw", "dram->dram", 1, run_mbw(mbw, total_bytes // 2, cores[0])

    for turn in (ours, peers) if ours_first else (peers, ours):
        yield from turn()


def compare(figures: Figures) -> list[Compared]:
    """Compare by thread count where both sides have it, and the best of each side per round."""
    lines = []
    for path in ("dram", "dram->dram"):
        counts = sorted(threads for who, at, threads in figures if (who, at) == ("ours", path))
        for threads in counts:
            for peer in ("C", "mbw"):
                if theirs := figures.get((peer, path, threads)):
                    ours = figures["ours", path, threads]
                    lines.append(_compared(path, threads, peer, ours, theirs, checked=peer == "mbw"))
        ours, theirs = (
            [
                max(rates)
                for rates in zip(
                    *(series for (by, at, _), series in figures.items() if (by, at) == (who, path)), strict=False
                )
            ]
            for who in ("ours", "C")
        )
        if ours and theirs:
            lines.append(_compared(path, None, "C", ours, theirs, checked=True))
    return lines


def _compared(
    path: str, threads: int | None, peer: str, ours: list[float], theirs: list[float], *, checked: bool
) -> Compared:
    ratio = median(mine / other for mine, other in zip(ours, theirs, strict=False))
    return Compared(path, threads, peer, median(ours), median(theirs), ratio, checked)


def report(lines: list[Compared], figures: Figures, about: dict[str, object]) -> None:
    """Print the table and write the JSON."""
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'path':12}{'threads':>8}  {'peer':6}{'ours GB/s':>10}{'peer GB/s':>10}{'ratio':>7}")
    for line in lines:
        verdict = ("  ok" if line.within else "  OUTSIDE") if line.checked else ""
        print(
            f"{line.path:12}{line.threads or 'best':>8}  {line.peer:6}{line.ours_gb_s:10.1f}{line.peer_gb_s:10.1f}"
            f"{line.ratio:7.2f}{verdict}"
        )
    document = {
        **about,
        "lines": [{**asdict(line), "within": line.within} for line in lines],
        "rounds_gb_s": {f"{who} {path} {threads}": rates for (who, path, threads), rates in figures.items()},
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/bandwidth.json").write_text(json.dumps(document, indent=2) + "\n")


def main() -> int:
    """Run all rounds and judge them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of each measurement, at each number of threads"
    )
    options = parser.parse_args()
    machine = Machine(name="this", cpu=read_cpu(LocalHost())[0])
    cores = usable_cores(machine)
    total_bytes = working_set_bytes(machine.cpu.l3_bytes, free_bytes(machine), thread_counts(len(cores)))
    with tempfile.TemporaryDirectory() as folder:
        peer = build_peer(Path(folder))
        mbw = find_mbw()
        if peer is None and mbw is None:
            print("no peer to compare with: install gcc or mbw", file=sys.stderr)
            return 2
        figures: Figures = defaultdict(list)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            for who, path, threads, gb_s in play_round(
                machine, total_bytes, options.seconds, peer, mbw, ours_first=number % 2 == 0
            ):
                figures[who, path, threads].append(round(gb_s, 2))
    lines = compare(figures)
    report(
        lines,
        figures,
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": machine.cpu.model,
            "cores": len(cores),
            "l3": format_bytes(machine.cpu.l3_bytes) if machine.cpu.l3_bytes else None,
            "memory_streamed": format_bytes(total_bytes),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "numpy": np.__version__,
            "rounds": options.rounds,
        },
    )
    return 0 if all(line.within for line in lines if line.checked) else 1


if __name__ == "__main__":
    sys.exit(main())
