"""Slow loads: compared with a forecast or the disk, with the cause and a command that helps."""

from dataclasses import replace

import pytest

from support.plans import placed, settings
from tokenmill.engine.loading.diagnosis import LoadFacts, diagnose, facts, slow
from tokenmill.engine.loading.progress import LoadProgress, Sample
from tokenmill.engine.loading.system import Pressure, System
from tokenmill.hardware.machine import Disk, Measurements, NumaNode, Rate
from tokenmill.model.read import read
from tokenmill.units import GIB, KIB, MIB

# A tenth of 500 GiB after a minute, where three minutes were forecast: it will take ten.
SLOW = LoadFacts(
    elapsed_s=60,
    bytes_loaded=50 * GIB,
    bytes_total=500 * GIB,
    rate_bytes_s=450 * GIB / 540,
    forecast_s=180,
    disk_expected_bytes_s=3.2e9,
    disk_measured=True,
    disk="nvme0n1",
    own_disk_rate_bytes_s=8.9e8,
    disk_rate_bytes_s=9e8,
)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, ("10 min", "3 min")),
        ({"forecast_s": 500.0}, None),  # within half as much again
        ({"elapsed_s": 5.0}, None),
        ({"bytes_loaded": 500 * GIB}, None),
        ({"forecast_s": None}, ("895 MB/s", "3.2 GB/s")),
        ({"forecast_s": None, "disk_expected_bytes_s": None}, None),  # nothing to compare with
        ({"forecast_s": None, "disk_expected_bytes_s": 1.2e9}, None),
        ({"forecast_s": 3.0}, None),  # too short to tell
        ({"rate_bytes_s": 0.0, "idle_s": 90.0}, ("90 s",)),
        ({"rate_bytes_s": None}, None),
    ],
)
def test_slow_compared_with_the_forecast_or_the_disk(
    changes: dict[str, float | None], values: tuple[str, ...] | None
) -> None:
    found = slow(replace(SLOW, **changes))  # type: ignore[arg-type]
    assert (found is None) == (values is None)
    assert all(value in (found or "") for value in values or ())


def test_a_load_as_forecast_has_no_findings() -> None:
    assert diagnose(replace(SLOW, forecast_s=500.0, swap_out_bytes_s=1e9, throttled=5, cgroup_high_bytes=GIB)) == ()


@pytest.mark.parametrize(
    ("changes", "values", "hint"),
    [
        ({}, ("890 MB/s", "3.2 GB/s measured"), "cat MODEL*"),
        (
            {"own_disk_rate_bytes_s": 2.1e8, "disk_rate_bytes_s": 2.1e8, "disk_busy": 0.99},
            ("210 MB/s", "3.2 GB/s measured", "99%"),
            "smartctl -a /dev/nvme0n1",
        ),
        ({"disk_rate_bytes_s": 3e9}, ("890 MB/s", "2.1 GB/s"), "iotop"),
        ({"major_faults_s": 100_000.0, "disk_busy": 0.4}, ("8.7 KiB",), "--no-mmap"),
        ({"network": True}, ("network file system", "890 MB/s"), "local disk"),
        ({"disk_measured": False}, ("3.2 GB/s stated",), "cat MODEL*"),
        (
            {"swap_out_bytes_s": 1.2e8, "swap_in_bytes_s": 3e6, "available_bytes": 2 * GIB},
            ("120 MB/s out", "3 MB/s in", "2.0 GiB"),
            "ps aux --sort=-rss",
        ),
        (
            {"throttled": 12, "cgroup_high_bytes": 400 * GIB, "cgroup": "/sys/fs/cgroup/mill"},
            ("memory.high of 400.0 GiB", "12 times"),
            "/sys/fs/cgroup/mill/memory.high",
        ),
        ({"memory_waits": 0.6}, ("memory in 60%",), "--reserve-ram"),
        ({"own_disk_rate_bytes_s": None, "io_waits": 0.5}, ("I/O in 50%",), "iostat"),
    ],
)
def test_reasons(changes: dict[str, object], values: tuple[str, ...], hint: str) -> None:
    slowness, *reasons = diagnose(replace(SLOW, **changes))  # type: ignore[arg-type]
    assert "10 min" in slowness.text
    assert [each for each in reasons if all(value in each.text for value in values) and hint in (each.hint or "")], (
        reasons
    )


def test_a_disk_as_fast_as_it_should_be_is_no_reason() -> None:
    quick = replace(SLOW, own_disk_rate_bytes_s=3e9, disk_rate_bytes_s=3e9)
    (finding,) = diagnose(quick)
    assert finding.text.startswith(slow(quick) or "?")
    assert finding.text != slow(quick)


def test_a_stall_says_where_to_look() -> None:
    stalled = replace(SLOW, rate_bytes_s=0.0, own_disk_rate_bytes_s=0.0, idle_s=120.0)
    (finding,) = diagnose(stalled)
    assert "2 min" in finding.text
    assert "/proc/PID/stack" in (finding.hint or "")


@pytest.mark.parametrize(
    ("known", "limit", "wanted"),
    [
        (True, 8 * MIB, ["512.0 GiB", "8.0 MiB"]),
        (True, None, []),
        (True, 600 * GIB, []),
        (False, None, []),
    ],
)
def test_locks_are_told_of_however_fast_the_load_is(known: bool, limit: int | None, wanted: list[str]) -> None:
    given = LoadFacts(1.0, mlock_bytes=512 * GIB, memlock_known=known, memlock_bytes=limit)
    found = diagnose(given)
    assert len(found) == bool(wanted)
    assert all(value in finding.text for finding in found for value in wanted)
    if wanted:
        assert "LimitMEMLOCK=infinity" in (diagnose(given)[0].hint or "")


@pytest.mark.parametrize(
    ("growth", "spread", "count"),
    [
        ({0: 97 * GIB, 1: 3 * GIB}, True, 1),
        ({0: 97 * GIB, 1: 3 * GIB}, False, 0),  # the plan binds it to one node
        ({0: 50 * GIB, 1: 50 * GIB}, True, 0),
        ({0: 97 * GIB}, True, 0),
        ({0: 97 * MIB, 1: 0}, True, 0),
        ({0: -GIB, 1: 97 * GIB}, True, 1),
    ],
)
def test_one_sided_memory(growth: dict[int, int], spread: bool, count: int) -> None:
    found = diagnose(LoadFacts(1.0, node_growth_bytes=growth, spread=spread))
    assert len(found) == count
    if count:
        node = max(growth, key=growth.__getitem__)
        assert f"node {node} of 2" in found[0].text
        assert "numactl --interleave=all" in (found[0].hint or "")


def test_facts_of_two_looks() -> None:
    plan = placed(read("kimi-k2.5:Q4_K_S"), replace(settings(), mlock=True))
    nodes = tuple(NumaNode(index, (index,), 300 * GIB) for index in range(2))
    machine = replace(
        plan.machine,
        numa=nodes,
        disk=Disk("/data", kind="nvme"),
        measured=Measurements("2026-11-01T00:00:00Z", (Rate("disk", 3.2),)),
    )
    plan = replace(plan, machine=machine, forecast=replace(plan.forecast, load_cold_s=180.0, load_warm_s=1.0))
    systems = [
        System(0.0, node_bytes={0: GIB, 1: GIB}),
        System(
            50.0,
            swapped_in_bytes=0,
            swapped_out_bytes=100 * MIB,
            disk_read_bytes=0,
            disk_busy_s=10.0,
            cgroup_throttled=3,
            node_bytes={0: 2 * GIB, 1: GIB},
        ),
        System(
            60.0,
            swapped_in_bytes=0,
            swapped_out_bytes=120 * MIB,
            disk_read_bytes=2 * GIB,
            disk_busy_s=19.0,
            cgroup_throttled=5,
            node_bytes={0: 51 * GIB, 1: 2 * GIB},
            memory=Pressure(0.3),
            memlock_known=True,
            memlock_bytes=64 * KIB,
            disk="nvme0n1",
        ),
    ]
    samples = [Sample(0.0), Sample(50.0, disk_bytes=0, major_faults=10), Sample(60.0, disk_bytes=GIB, major_faults=110)]
    found = facts(plan, systems, samples, LoadProgress("reading", 50 * GIB, 500 * GIB, 1e9), idle_s=4.0)
    assert found == LoadFacts(
        elapsed_s=60.0,
        bytes_loaded=50 * GIB,
        bytes_total=500 * GIB,
        rate_bytes_s=1e9,
        forecast_s=180.0,
        disk_expected_bytes_s=3.2e9,
        disk_measured=True,
        disk="nvme0n1",
        disk_rate_bytes_s=2 * GIB / 10,
        disk_busy=0.9,
        own_disk_rate_bytes_s=GIB / 10,
        major_faults_s=10.0,
        swap_in_bytes_s=0.0,
        swap_out_bytes_s=2 * MIB,
        memory_waits=0.3,
        node_growth_bytes={0: 50 * GIB, 1: GIB},
        spread=True,
        throttled=2,
        mlock_bytes=plan.ledger.of("dram", "weights") + plan.ledger.of("dram", "repack"),
        memlock_known=True,
        memlock_bytes=64 * KIB,
        idle_s=4.0,
    )
    assert facts(plan, systems, samples, LoadProgress("reading"), warm=True).forecast_s == 1.0


def test_one_look_gives_no_rates() -> None:
    plan = placed(read("kimi-k2.5:Q4_K_S"), settings())
    found = facts(plan, [System(5.0, disk_read_bytes=7)], [Sample(5.0, disk_bytes=7)], LoadProgress("starting"))
    assert (found.elapsed_s, found.disk_rate_bytes_s, found.own_disk_rate_bytes_s) == (0.0, None, None)
