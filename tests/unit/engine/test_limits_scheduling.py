"""Preparations: created from a plan, encoded, and applied by the kernel in a real process."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.plans import placed, settings
from tokenmill.config import EngineConfig
from tokenmill.engine.limits.scheduling import preparation
from tokenmill.engine.process import preparation as process_preparation
from tokenmill.engine.process.preparation import RR_PRIORITY, Preparation
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Cpu, Dram, Limits, Machine, NumaNode
from tokenmill.launch.binding import host_weights_bytes
from tokenmill.model.read import read
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

NUMBERS = st.lists(st.integers(0, 1023), unique=True, min_size=1).map(tuple)
PREPARATIONS = st.builds(
    Preparation,
    nice=st.none() | st.integers(-20, 19),
    scheduling=st.sampled_from(["normal", "batch", "rr"]),
    cpus=st.none() | NUMBERS,
    nodes=st.none() | NUMBERS,
    interleave=st.booleans(),
    memlock_bytes=st.none() | st.integers(0, 1 << 50),
    oom_score_adj=st.none() | st.integers(-1000, 1000),
    group=st.none() | st.just("/sys/fs/cgroup/mill"),
)


@given(PREPARATIONS)
def test_travels_as_one_argument(wanted: Preparation) -> None:
    text = wanted.encode()
    assert "\n" not in text
    assert Preparation.decode(text) == wanted


@given(PREPARATIONS)
def test_every_wish_has_words(wanted: Preparation) -> None:
    wishes = [wanted.nice, wanted.cpus, wanted.nodes, wanted.memlock_bytes, wanted.oom_score_adj, wanted.group]
    assert len(wanted.describe()) == sum(wish is not None for wish in wishes) + (wanted.scheduling != "normal")


def test_nothing_asked_is_nothing_said() -> None:
    assert Preparation().encode() == "{}"
    assert Preparation().describe() == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nice",
        '{"nicer": 1}',
        '{"nice": "5"}',
        '{"nice": 20}',
        '{"nice": true}',
        '{"scheduling": "fifo"}',
        '{"cpus": [-1]}',
        '{"cpus": 3}',
        '{"cpus": [99999999999999999999]}',
        '{"interleave": 1}',
        '{"oom_score_adj": 1001}',
        '{"memlock_bytes": -1}',
        '{"group": 1}',
        '{"group": "mill"}',
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Preparation.decode(text)


def plan_on(machine: Machine, *, reserve_cores: int = 0, mlock: bool = False) -> Plan:
    made = placed(read("llama-4-scout:Q4_K_M"), replace(settings(), mlock=mlock))
    return replace(made, machine=machine, goal=replace(made.goal, reserve_cores=reserve_cores))


ONE = Machine(
    "one",
    cpu=Cpu(cores=16, threads_per_core=2),
    dram=Dram(total_bytes=768 * GIB),
    numa=(NumaNode(0, tuple(range(32)), 768 * GIB),),
)
TWO = Machine(
    "two",
    cpu=Cpu(cores=16, threads_per_core=1),
    dram=Dram(total_bytes=64 * GIB),
    numa=(NumaNode(0, tuple(range(8)), 32 * GIB), NumaNode(1, tuple(range(8, 16)), 32 * GIB)),
)
TWO_LARGE = replace(TWO, numa=tuple(replace(node, memory_bytes=512 * GIB) for node in TWO.numa))


def test_without_a_reserve_the_engine_is_only_the_first_to_be_killed_for_memory() -> None:
    assert preparation(plan_on(ONE), EngineConfig()) == Preparation(oom_score_adj=1000)


def test_reserved_cores_are_left_with_their_siblings_unless_told_not_to() -> None:
    wanted = preparation(plan_on(ONE, reserve_cores=3), EngineConfig())
    assert wanted == Preparation(cpus=(*range(13), *range(16, 29)), oom_score_adj=1000)
    unpinned = preparation(plan_on(ONE, reserve_cores=3), EngineConfig(pin_cores=False))
    assert unpinned == Preparation(oom_score_adj=1000)


def test_pinning_leaves_the_reserved_cores_alone() -> None:
    wanted = preparation(plan_on(ONE, reserve_cores=3), EngineConfig(pin_cores=True, nice=5, scheduling="batch"))
    assert wanted == Preparation(nice=5, scheduling="batch", cpus=tuple(range(13)), oom_score_adj=1000)
    assert wanted.describe() == ("nice 5", "batch scheduling", "CPUs 0-12", "out-of-memory score +1000")


def test_nothing_is_pinned_where_nothing_is_reserved() -> None:
    assert preparation(plan_on(ONE), EngineConfig(pin_cores=True)).cpus is None


def test_a_model_that_no_node_holds_is_spread_over_all() -> None:
    wanted = preparation(plan_on(TWO), EngineConfig())
    assert (wanted.nodes, wanted.interleave) == ((0, 1), True)
    assert wanted.describe()[0].endswith("NUMA nodes 0-1")


def test_a_model_that_one_node_holds_stays_there_with_its_processors() -> None:
    wanted = preparation(plan_on(TWO_LARGE), EngineConfig(pin_cores=True))
    assert (wanted.nodes, wanted.interleave, wanted.cpus) == ((0,), False, tuple(range(8)))
    fewer = replace(TWO_LARGE, limits=Limits(cpuset=(2, 3, 9)))
    assert preparation(plan_on(fewer), EngineConfig(pin_cores=True)).cpus == (2, 3)


def test_what_will_be_locked_is_asked_for() -> None:
    made = plan_on(ONE, mlock=True)
    assert preparation(made, EngineConfig()).memlock_bytes == host_weights_bytes(made)


@pytest.mark.parametrize("config", [EngineConfig(nice=20), EngineConfig(nice=-21), EngineConfig(scheduling="fifo")])
def test_a_wrong_configuration_is_refused_before_anything_starts(config: EngineConfig) -> None:
    with pytest.raises(UsageError, match="engine\\."):
        preparation(plan_on(ONE), config)


WITHOUT_RIGHTS = """
import ctypes
libc = ctypes.CDLL(None)
for right in range(64): libc.prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
"""


def applied(wanted: Preparation, *, before: str = "") -> dict[str, Any]:
    """Apply it in a process without capabilities, exec another program there, and return the settings it has."""
    look = (
        "import json, os, resource; print(json.dumps(dict(nice=os.getpriority(os.PRIO_PROCESS, 0), "
        "policy=os.sched_getscheduler(0), cpus=sorted(os.sched_getaffinity(0)), "
        "memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK), oom=int(open('/proc/self/oom_score_adj').read()), "
        "policies=sorted({line.split()[1] for line in os.path.exists('/proc/self/numa_maps') and open('/proc/self/numa_maps') or ()}))))"
    )
    script = (
        "import os, sys, resource\n"
        "from tokenmill.engine.process.preparation import Preparation\n"
        f"{before}\n"
        f"{WITHOUT_RIGHTS}\n"
        "notes = Preparation.decode(sys.argv[1]).apply()\n"
        "sys.stderr.write('\\n'.join(notes)); sys.stderr.flush()\n"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, wanted.encode(), look], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"notes": done.stderr.splitlines()}


def test_what_needs_no_right_outlives_exec() -> None:
    one = min(os.sched_getaffinity(0))
    got = applied(Preparation(nice=7, scheduling="batch", cpus=(one,), oom_score_adj=300))
    assert got["notes"] == []
    assert (got["nice"], got["policy"], got["cpus"], got["oom"]) == (7, os.SCHED_BATCH, [one], 300)


def test_refusals_are_sentences_with_a_remedy_and_change_nothing() -> None:
    got = applied(
        Preparation(nice=-5, scheduling="rr", oom_score_adj=-500),
        before="resource.setrlimit(resource.RLIMIT_NICE, (0, 0)); resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))",
    )
    oom, nice, rr = got["notes"]
    assert "OOMScoreAdjust=" in oom
    assert "LimitNICE=-5" in nice
    assert "--nice=25" in nice
    assert "LimitRTPRIO=1" in rr
    assert (got["nice"], got["policy"]) == (0, os.SCHED_OTHER)


def test_a_session_that_could_not_be_ranked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(process_preparation, "set_session_nice", refused)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    (note,) = Preparation(nice=mine).apply()
    assert f"nice {mine}" in note
    assert "kernel.sched_autogroup_enabled" in note
    assert os.strerror(errno.EAGAIN) in note


def test_cores_that_are_not_there_are_named() -> None:
    there, absent = min(os.sched_getaffinity(0)), 4000
    got = applied(Preparation(cpus=(there, absent)))
    assert got["cpus"] == [there]
    [note] = got["notes"]
    assert "CPUs 4000" in note
    assert note.endswith(f" {there}")
    none = applied(Preparation(cpus=(absent,)))
    assert none["cpus"] == sorted(os.sched_getaffinity(0))
    assert f"CPUs 4000 were refused ({os.strerror(errno.EINVAL)})" in none["notes"][0]


def test_the_lock_limit_is_raised_as_far_as_it_goes() -> None:
    enough = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 1 << 20))"
    got = applied(Preparation(memlock_bytes=500_000), before=enough)
    assert (got["memlock"], got["notes"]) == ([1 << 20, 1 << 20], [])
    short = applied(Preparation(memlock_bytes=523 * GIB), before=enough)
    assert short["memlock"] == [1 << 20, 1 << 20]
    assert "523.0 GiB" in short["notes"][0]
    assert "1.0 MiB" in short["notes"][0]
    assert "LimitMEMLOCK=infinity" in short["notes"][0]


def test_memory_comes_from_the_nodes_asked_for_after_exec_too() -> None:
    got = applied(Preparation(nodes=(0,), interleave=True))
    assert got["notes"] == []
    assert "interleave:0" in str(got["policies"])
    assert "bind:0" in str(applied(Preparation(nodes=(0,)))["policies"])


def test_memory_nodes_that_are_not_there_are_refused_in_words() -> None:
    got = applied(Preparation(nodes=(900,), interleave=True))
    assert "NUMA nodes 900 was refused" in got["notes"][0]
    assert "--cap-add=SYS_NICE" in got["notes"][0]


def test_real_time_is_the_lowest_that_there_is() -> None:
    assert os.sched_get_priority_min(os.SCHED_RR) == RR_PRIORITY


def test_the_child_imports_nothing_heavy() -> None:
    script = "import sys, tokenmill.engine.process.preparation; print(sorted({'pydantic', 'numpy', 'tokenmill.planner'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
