"""Warm-up: progress, cold against warm requests, and how much of the page cache may be filled."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.doctor_machines import captured, planned
from support.fake_engine import FakeEngine
from tokenmill.engine.page_cache import CacheFill
from tokenmill.engine.pinned_prefixes import PinnedPrefix, PinReport
from tokenmill.engine.warm import (
    ColdStart,
    WarmProgress,
    WarmReport,
    WarmRun,
    cacheable_bytes,
    fill_ahead,
    pin_with_progress,
)
from tokenmill.hardware.machine import Measurements, Rate
from tokenmill.launch.binding import mapped_bytes
from tokenmill.planner.plan import Forecast, LedgerRow, Plan, Speed
from tokenmill.units import GIB, KIB, MIB

MEASURED = Measurements("2026-11-15T00:00:00Z", (Rate("disk", 2.0),))


def plan(**changes: Any) -> Plan:
    made = planned(**changes)
    forecast = Forecast((Speed(16.0, 0, 1, (), "estimated"),), (Speed(40.0, 0, 1, (), "estimated"),), None, None, None)
    return replace(made, machine=replace(made.machine, measured=MEASURED), forecast=forecast)


def test_a_head_is_announced_with_what_it_will_take() -> None:
    seen: list[WarmProgress] = []
    heads = (PinnedPrefix("digest", "text", 8000), PinnedPrefix("rules", "text"))

    async def pin() -> PinReport:
        return await pin_with_progress(FakeEngine(), plan(), heads, None, None, seen.append)

    held = asyncio.run(pin())
    assert [(head.name, head.how) for head in held.prefixes] == [("digest", "computed"), ("rules", "computed")]
    assert [(now.detail, now.done, now.total, now.eta_s) for now in seen] == [
        ("digest, 8,000 tokens", 0, 2, 200.0),
        ("rules", 1, 2, None),
    ]


def test_weights_that_were_rewritten_are_not_read_from_the_file_again() -> None:
    made = plan()
    assert mapped_bytes(made) == made.ledger.of("dram", "weights")
    rewritten = replace(
        made, ledger=replace(made.ledger, page_cache=(LedgerRow("dram", "weights", mapped_bytes(made)),))
    )
    assert mapped_bytes(rewritten) == 0
    assert mapped_bytes(plan(mmap=False)) == 0


def run(seconds: float) -> WarmRun:
    return WarmRun(seconds, None, None, None, 8)


def test_cold_is_reading_and_the_first_request() -> None:
    filled = CacheFill(93 * GIB, 93 * GIB, 93 * GIB, 38.0)
    report = WarmReport(filled, None, run(4.0), run(2.0))
    start = report.cold_start
    assert (start.cold_s, start.read_s, start.warm_s, start.times) == (42.0, 38.0, 2.0, 21.0)
    assert all(value in start.describe() for value in ("2.0 s", "42 s", "38 s"))


def test_nothing_gained_is_said_as_such() -> None:
    assert "2.1 s" not in ColdStart(2.1, 0.0, 2.0).describe()
    assert "2.0 s" in ColdStart(2.1, 0.0, 2.0).describe()
    assert "not measured" in ColdStart(None, 0.0, None).describe()
    assert WarmReport(None, None, None, None).cold_start.times is None


def test_rates_are_the_engines_own() -> None:
    assert WarmRun(9.0, 1.0, 0.5, 2.0, 8).decode_tok_s == 4.0
    assert run(9.0).decode_tok_s is None


def test_room_is_what_is_available_less_what_the_engine_will_take(tmp_path: Path) -> None:
    host = captured(tmp_path, "eight-3090")
    made = plan()
    available = 491234560 * KIB
    host.unpack("-- /proc/meminfo --\nMemTotal:       527942792 kB\nMemAvailable:   491234560 kB\n")
    rows = made.ledger.full_context
    own = sum(row.bytes for row in rows if row.tier == "dram" and row.item not in ("weights", "reserve"))
    assert own > 0
    assert cacheable_bytes(made, host, loaded=True) == available
    assert cacheable_bytes(made, host, loaded=False) == available - own
    host.unpack("-- /proc/meminfo --\n")
    assert cacheable_bytes(made, host, loaded=True) is None


def test_pages_count_for_the_control_group_of_who_reads_them(tmp_path: Path) -> None:
    host = captured(tmp_path, "epyc-dual")
    host.unpack("-- /sys/fs/cgroup/mill.slice/memory.max --\n1073741824\n")
    assert cacheable_bytes(plan(), host, loaded=True) == GIB


def test_only_plans_that_map_their_files_fill_the_cache(tmp_path: Path) -> None:
    absent = [tmp_path / "absent.gguf"]  # would be an error if it were read
    assert asyncio.run(fill_ahead(plan(mmap=False), absent)) is None
    made = plan()
    rewritten = replace(
        made, ledger=replace(made.ledger, page_cache=(LedgerRow("dram", "weights", mapped_bytes(made)),))
    )
    assert asyncio.run(fill_ahead(rewritten, absent, loaded=True)) is None


def test_filling_tells_its_progress_in_the_callers_loop(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(MIB) * 8)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seen: list[WarmProgress] = []

    async def filling() -> CacheFill | None:
        done = await fill_ahead(plan(), [path], progress=seen.append)
        await asyncio.sleep(0)  # lets callbacks from the thread run
        return done

    done = asyncio.run(filling())
    assert done is not None
    assert done.read_bytes == 8 * MIB
    assert (seen[-1].step, seen[-1].done, seen[-1].total) == ("page cache", 8 * MIB, 8 * MIB)


def test_cancelling_stops_the_readers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * MIB)

    async def cancelled() -> None:
        task = asyncio.create_task(fill_ahead(plan(), [path]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)

    asyncio.run(cancelled())
