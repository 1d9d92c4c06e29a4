"""Exit status of processes, and signs of out-of-memory kills, from files as the kernel writes them."""

import json
import os
import signal
from pathlib import Path

import pytest

from tokenmill.engine.process import exit_status
from tokenmill.engine.process.exit_status import Exit, read_exit
from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.units import GIB

QUIET, KILLED = {"system": 0, "cgroup": 0}, {"system": 1, "cgroup": 0}
KERNEL = "Out of memory: Killed process 12 (llama-server) total-vm:9kB, anon-rss:8kB"


@pytest.mark.parametrize(
    ("end", "for_memory", "words"),
    [
        (Exit(code=0), False, ("code 0",)),
        (Exit(code=3, kills=QUIET), False, ("code 3",)),
        (Exit(), False, ("unknown",)),
        (Exit(signal=15, asked=True), False, ("stopped",)),
        (Exit(signal=9, asked=True, kills=KILLED), False, ("stopped",)),
        (Exit(signal=9, kills=QUIET), False, ("SIGKILL", "by another process")),
        (Exit(signal=9), None, ("SIGKILL", "by another process or by the OOM killer")),
        (Exit(signal=9, kills=KILLED), True, ("probably", "OOM killer", "5.0 GiB")),
        (Exit(code=137, kills=KILLED), True, ("probably", "OOM killer", "5.0 GiB")),
        (
            Exit(signal=9, kills=QUIET, most_rss_bytes=7 * GIB, memory_bytes=8 * GIB),
            True,
            ("probably", "OOM killer", "7.0 GiB of 8.0 GiB", "5.0 GiB"),
        ),
        (
            Exit(signal=9, kills=QUIET, most_rss_bytes=GIB, memory_bytes=8 * GIB),
            False,
            ("SIGKILL", "by another process"),
        ),
        (Exit(signal=9, kernel=KERNEL, most_rss_bytes=7 * GIB), True, ("OOM killer", "7.0 GiB", "5.0 GiB")),
        (Exit(signal=11, kills=QUIET), False, ("SIGSEGV",)),
        (Exit(signal=signal.SIGRTMIN + 3, kills=QUIET), False, (f"signal {signal.SIGRTMIN + 3}",)),
        (Exit(code=1, kills=KILLED), False, ("code 1", "OOM killer")),
    ],
)
def test_words(end: Exit, for_memory: bool | None, words: tuple[str, ...]) -> None:
    assert end.for_memory is for_memory
    text = end.describe(5 * GIB)
    assert all(word in text for word in words), text
    assert ("OOM killer" in text) == ("OOM killer" in " ".join(words))
    assert ("probably" in text) == ("probably" in words)


def test_without_a_plan_no_prediction_is_named() -> None:
    assert "GiB" not in Exit(signal=9, kills=KILLED).describe()


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_reports_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "x").write_text(text)
    assert read_exit(tmp_path / "x") is None


def test_a_report_of_a_newer_version_is_read_as_far_as_known(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({"code": 2, "pid": 5, "something": 1}))
    assert read_exit(tmp_path / "x") == Exit(code=2)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kills_in_both_versions_of_cgroups(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"vmstat": "pgfault 5\noom_kill 2\n", "self/cgroup": "0::/a/b\n"})
    groups = tree(tmp_path / "groups", {"a/b/memory.events": "low 0\noom 1\noom_kill 4\noom_group_kill 9\n"})
    assert exit_status.kill_counts(proc, groups) == {"system": 2, "cgroup": 4}
    proc = tree(tmp_path / "proc1", {"self/cgroup": "5:cpu,cpuacct:/\n4:memory:/x\n0::/\n"})
    groups = tree(
        tmp_path / "groups1", {"memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    )
    assert exit_status.kill_counts(proc, groups) == {"cgroup": 3}
    assert exit_status.kill_counts(tmp_path, tmp_path) == {}


def test_the_least_limit_counts(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": "MemTotal:       1000 kB\nMemFree: 5 kB\n", "self/cgroup": "0::/a/b\n"})
    groups = tree(tmp_path / "groups", {"a/b/memory.max": "max\n", "a/memory.max": "2048\n"})
    assert exit_status.memory_limit_bytes(proc, groups) == 2048
    assert exit_status.memory_limit_bytes(proc, tmp_path / "none") == 1000 * 1024
    assert exit_status.memory_limit_bytes(tmp_path, tmp_path) is None


def test_the_kernels_message() -> None:
    log = f"6,1,2,-;other\n6,2,3,-;{KERNEL}\n SUBSYSTEM=x"
    assert exit_status.killed_line(log, 12) == KERNEL
    assert exit_status.killed_line(log, 1) is None
    assert exit_status.killed_line("Memory cgroup out of memory: Killed process 7 (x)", 7)


def test_only_messages_since_it_started_count(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"6,1,5000000,-;{KERNEL}\n")
    assert exit_status.kernel_line(12, 4.0, str(log)) == KERNEL
    assert exit_status.kernel_line(12, 6.0, str(log)) is None, "that was another process of the same number"
    assert exit_status.kernel_line(12, 0.0, str(tmp_path / "none")) is None
    assert exit_status.recorded_s("no head") == 0


def test_this_process_is_itself() -> None:
    me = Pid.of(os.getpid())
    assert me is not None
    assert me.alive
    assert not Pid(me.pid, me.ticks + 1, me.boot).alive, "the number is used again"
    assert not Pid(me.pid, me.ticks, "another boot").alive
    assert os.getpid() in descendants(os.getppid())
