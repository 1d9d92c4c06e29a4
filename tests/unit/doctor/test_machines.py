"""All checks on whole machines: captured ones, and ones written from published reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.doctor_machines import captured, looked_at
from tokenmill.cli.planning.doctor import CopyLine, render
from tokenmill.doctor.check_result import SEVERITIES, CheckResult
from tokenmill.doctor.examine import CHECKS, examine
from tokenmill.doctor.facts import Facts, MemoryHolder
from tokenmill.hardware.gpu.nvml import NvmlReading
from tokenmill.units import GIB, MIB
from unit.hardware.conftest import DATA, load_nvml

MACHINES = ("epyc-dual", "desktop", "eight-3090", "optane-memory-mode", "pmem-app-direct", "this-vm", "h200-vm")


def found(facts: Facts) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in examine(facts)}


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_examined_and_unreadable_facts_are_unknown(name: str, tmp_path: Path) -> None:
    findings = examine(looked_at(captured(tmp_path, name)))
    # none of these captures contains the kernel's counters, so these checks must not be fine
    unknown = {finding.check for finding in findings if finding.severity == "unknown"}
    assert {"swap", "oom-kills", "overcommit", "governor", "shared-memory"} <= unknown
    ranks = [SEVERITIES.index(finding.severity) for finding in findings]
    assert ranks == sorted(ranks)
    assert len({finding.check for finding in findings}) == len(findings)
    for finding in findings:
        if finding.severity in ("problem", "advice"):
            assert finding.why
            assert finding.remedies


def test_a_machine_that_shows_nothing_is_unknown_and_not_fine(tmp_path: Path) -> None:
    host = captured(tmp_path, "pmem-app-direct")
    found_here = found(looked_at(host))
    fine = {check for check, finding in found_here.items() if finding.severity == "fine"}
    assert fine == {"file-system", "engines"}


def test_this_machine_really_captured(tmp_path: Path) -> None:
    facts = looked_at(captured(tmp_path, "this-vm", "this-vm"))
    findings = found(facts)
    assert findings["swap"].severity == "fine"
    assert "no swap" in findings["swap"].seen
    assert findings["overcommit"].severity == "fine"
    assert "killed 1 process " in findings["oom-kills"].seen
    assert "3.8 h" in findings["oom-kills"].seen
    assert findings["memlock"].severity == "advice"
    assert findings["governor"].severity == "unknown"
    assert "cpu-throttling" not in findings  # a guest does not see it
    assert "memory-channels" not in findings
    assert "gpu-link" not in findings


def test_the_h200_really_captured(tmp_path: Path) -> None:
    facts = looked_at(captured(tmp_path, "h200-vm", "h200-vm"))
    assert facts.gpu_states is not None
    (state,) = facts.gpu_states
    assert (state.persistent, state.power_limit_w, state.default_power_limit_w) == (True, 700.0, 700.0)
    assert (state.slowed_by, state.device_generation, state.temperature_c) == ((), 5, 36.0)
    assert state.holders == (MemoryHolder("python3", 460, 4614 * MIB),)
    findings = found(facts)
    for check in ("gpu-link", "gpu-power", "gpu-persistence", "gpu-throttling", "gpu-memory", "shared-memory"):
        assert findings[check].severity == "fine", findings[check]


def full_cards() -> NvmlReading:
    """The eight cards of the report with the model on them."""
    reading = load_nvml(DATA / "eight-3090" / "nvml.json")
    used = (22303, 21962, 21961, 21744, 22248, 21744, 21962, 22933)
    cards = (
        replace(card, memory_free_bytes=24 * GIB - size * MIB) for card, size in zip(reading.cards, used, strict=True)
    )
    return replace(reading, cards=tuple(cards))


def test_eight_cards_while_the_model_swaps_in(tmp_path: Path) -> None:
    host = captured(tmp_path, "eight-3090", "eight-3090-loading", nvml=full_cards())
    # 500 MB/s are swapped in, a tenth of that is swapped out
    facts = looked_at(host, between="-- /proc/vmstat --\npswpin 1322070\npswpout 4112207\noom_kill 2\n")
    findings = found(facts)
    swap = findings["swap"]
    assert swap.severity == "problem"
    for fact in ("500 MB/s in", "50 MB/s out", "9.5 GiB of 128.0 GiB", "llama-server (4711) 9.0 GiB"):
        assert fact in swap.seen
    assert "Web Content (900) 512.0 MiB" in swap.seen
    link = findings["gpu-link"]
    assert link.severity == "problem"
    for fact in ("GPU 7", "8 of 16", "15.8 GB/s of 31.5 GB/s"):
        assert fact in link.seen
    throttling = findings["gpu-throttling"]
    assert throttling.severity == "problem"
    for fact in ("GPU 3", "heat", "83 C"):
        assert fact in throttling.seen
    assert findings["gpu-power"].remedies[0].command == "sudo nvidia-smi -i 0,1,2,3,4,5,6,7 -pl 350"
    assert findings["gpu-persistence"].severity == "advice"
    memory = findings["gpu-memory"]
    assert memory.severity == "advice"
    assert "GPU 7: 1.6 GiB of 24.0 GiB" in memory.seen
    assert "llama-server (4711) 22.4 GiB" in memory.seen
    assert "kill 4711" in [remedy.command for remedy in memory.remedies]
    for fact in ("2933 MT/s", "3200", "8 %"):
        assert fact in findings["memory-speed"].seen


def test_two_sockets_with_every_setting_wrong(tmp_path: Path) -> None:
    host = captured(tmp_path, "epyc-dual", "epyc-dual-untuned")
    stat = "/sys/fs/cgroup/mill.slice/tokenmill.service/worker/cpu.stat"
    heat = "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    between = f"-- {stat} --\nnr_periods 110\nnr_throttled 44\n-- {heat} --\n15\n"
    findings = found(looked_at(host, between=between))
    problems = {check for check, finding in findings.items() if finding.severity == "problem"}
    assert problems == {"zone-reclaim", "cpu-limit", "cpu-throttling"}
    assert findings["zone-reclaim"].remedies[0].command == "sudo sysctl -w vm.zone_reclaim_mode=0"
    assert "throttled" in findings["cpu-limit"].seen
    assert (
        findings["cpu-limit"].remedies[0].command == "sudo systemctl set-property --runtime tokenmill.service CPUQuota="
    )
    assert "3 times in the last second" in findings["cpu-throttling"].seen
    limit = findings["memory-limit"]
    for fact in ("850.0 GiB", "1007.6 GiB", "memory.high"):
        assert fact in limit.seen
    assert limit.remedies[1].command == "sudo systemctl set-property tokenmill.service MemoryHigh=infinity"
    for fact in ("killed 3 processes", "1 in this control group", "14 days"):
        assert fact in findings["oom-kills"].seen
    for fact in ("powersave", "balance_power on 1 CPUs"):
        assert fact in findings["governor"].seen
    assert findings["numa-balancing"].severity == "advice"
    assert "16.0 GiB of 16.0 GiB" in findings["reserved-pages"].seen
    assert findings["overcommit"].severity == "advice"
    assert "64.0 MiB" in findings["shared-memory"].seen


@pytest.mark.parametrize("name", ["eight-3090", "epyc-dual"])
def test_reads_well_at_eighty_columns(name: str, tmp_path: Path) -> None:
    extra = {"eight-3090": "eight-3090-loading", "epyc-dual": "epyc-dual-untuned"}[name]
    findings = examine(looked_at(captured(tmp_path, name, extra)))
    lines = [str(part) for part in render(findings) if isinstance(part, CopyLine)]
    assert lines
    # commands are never wrapped, not even the few longer ones
    assert sum(len(line) > 80 for line in lines) <= len(lines) // 4
    joined = "\n".join(lines)
    for finding in findings:
        if finding.severity in ("problem", "advice"):
            for remedy in finding.remedies:
                if remedy.when != "by hand":
                    first = remedy.command.split(" | ")[0].split("\n")[0]
                    assert first in joined


def test_every_check_has_a_docstring_and_a_unique_name() -> None:
    assert all(check.__doc__ for check in CHECKS)
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
