"""The limits of an engine: what is reserved, what enforces it, and notes on what cannot be enforced."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from support.dialect_plans import machine_with
from support.plans import placed, settings
from tokenmill.cli.options import GoalOptions
from tokenmill.config import EngineConfig, ReserveConfig
from tokenmill.doctor.reserves import core_finding, memory_finding
from tokenmill.engine.limits.cgroup import find_scope, scope_arguments
from tokenmill.engine.limits.reserve import AppliedLimits, decisions, limit_for, prepare_limits
from tokenmill.hardware.machine import Cpu, Dram, Machine, NumaNode
from tokenmill.launch.binding import binding
from tokenmill.model.read import read
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

EPYC = Machine(
    "epyc",
    cpu=Cpu(cores=16, threads_per_core=2),
    dram=Dram(total_bytes=768 * GIB),
    numa=(NumaNode(0, tuple(range(32)), 768 * GIB),),
)


def plan_with(machine: Machine = EPYC, *, cores: int = 0, ram: int = 0) -> Plan:
    made = placed(read("llama-4-scout:Q4_K_M"), settings())
    goal = replace(made.goal, reserve_cores=cores, reserve_ram_bytes=ram)
    return replace(made, machine=machine, goal=goal)


def test_the_limit_is_what_there_is_less_the_reserve() -> None:
    assert limit_for(64 * GIB, 768 * GIB) == 704 * GIB
    assert limit_for(0, 768 * GIB) is None
    assert limit_for(768 * GIB, 768 * GIB) is None
    assert limit_for(1, None) is None


def test_a_plan_says_what_it_leaves() -> None:
    cpus, limit = decisions(plan_with(cores=3, ram=64 * GIB), EngineConfig(), here=False)
    assert (cpus.name, cpus.value) == ("cpus", "0-12,16-28")
    assert "13-15,29-31" in cpus.reason
    assert (limit.name, limit.value) == ("memory limit", "704.0 GiB")
    assert decisions(plan_with(), EngineConfig(), here=False) == ()
    assert decisions(plan_with(cores=3), EngineConfig(pin_cores=False), here=False) == ()


def test_what_holds_and_what_does_not_are_sentences() -> None:
    kept = AppliedLimits(
        3, 64 * GIB, tuple(range(13)), (13, 14, 15), "control group", 704 * GIB, "systemd scope", ("but.",)
    )
    cores, memory, note = kept.describe()
    assert all(value in cores for value in ("3 cores", "CPUs 13-15", "CPUs 0-12", "control group"))
    assert all(value in memory for value in ("64.0 GiB", "704.0 GiB", "systemd scope"))
    assert note == "but."


def test_nothing_reserved_is_nothing_arranged() -> None:
    arranged = prepare_limits(plan_with(), EngineConfig(nice=5), name="kimi")
    assert arranged.preparation is not None
    assert (arranged.preparation.nice, arranged.preparation.cpus, arranged.preparation.group) == (5, None, None)
    assert (arranged.applied, arranged.own_cpus, arranged.wrapper, arranged.cleanup_command) == (None, None, (), ())


def test_cores_of_this_machine_are_left_by_affinity_at_least() -> None:
    arranged = prepare_limits(plan_with(cores=1), EngineConfig(), name="kimi")
    try:
        kept = arranged.applied
        assert kept is not None
        assert kept.cpus is not None
        assert arranged.preparation is not None
        assert arranged.preparation.cpus == kept.cpus == arranged.own_cpus
        assert set(kept.cpus) | set(kept.left) >= os.sched_getaffinity(0) > set(kept.cpus)
        assert kept.cores_by in ("affinity", "control group")
        assert dict(arranged.env).keys() == {"VLLM_CPU_OMP_THREADS_BIND"}
    finally:
        arranged.undo()


def test_pinning_may_be_refused_and_too_much_cannot_be_left() -> None:
    refused = prepare_limits(plan_with(cores=1), EngineConfig(pin_cores=False), name="kimi")
    assert refused.applied is not None
    [note] = refused.applied.lacking
    assert "1 core " in note
    assert "engine.pin_cores = false" in note
    assert refused.own_cpus is None
    everything = prepare_limits(plan_with(cores=100_000), EngineConfig(), name="kimi")
    assert everything.applied is not None
    assert "100,000 cores" in everything.applied.lacking[0]


def test_memory_is_limited_or_the_reason_is_said_in_one_sentence() -> None:
    arranged = prepare_limits(plan_with(ram=GIB), EngineConfig(), name="kimi")
    try:
        assert arranged.applied is not None
        if arranged.applied.memory_by is None:
            [why] = arranged.applied.lacking
            assert "1.0 GiB" in why
            assert "MemoryMax=" in why
            assert "docs/coexistence.md" in why
            assert (arranged.wrapper, arranged.group) == ((), None)
        else:
            assert arranged.applied.lacking == ()
            assert arranged.wrapper or arranged.group
    finally:
        arranged.undo()


def test_a_container_has_limits_of_its_own() -> None:
    plan = plan_with(machine_with(), cores=3, ram=GIB)
    arranged = prepare_limits(plan, EngineConfig(), name="kimi", contained=True)
    assert arranged.preparation is None
    assert arranged.applied is not None
    assert (arranged.applied.cores_by, arranged.applied.cpus) == ("container", tuple(range(13)))
    assert arranged.applied.memory_max_bytes == binding(plan).memory_max_bytes
    assert prepare_limits(plan_with(), EngineConfig(), name="kimi", contained=True).applied is None


def test_a_scope_is_asked_for_in_words_that_systemd_knows() -> None:
    assert scope_arguments("kimi", 704 * GIB, root=True) == (
        "systemd-run",
        "--scope",
        "--quiet",
        "--collect",
        "--no-ask-password",
        "--description=tokenmill engine kimi",
        "--property=MemoryMax=720896M",
        "--",
    )
    assert scope_arguments("kimi", GIB, root=False)[1] == "--user"


@pytest.mark.parametrize(("script", "why"), [("exec true", None), ("echo no bus >&2; exit 1", "no bus")])
def test_a_scope_is_tried_out_before_it_is_relied_on(tmp_path: Path, script: str, why: str | None) -> None:
    program = tmp_path / "bin/systemd-run"
    for folder in ("bin", "systemd/system", "systemd/private"):
        (tmp_path / folder).mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}
    found = find_scope("kimi", GIB, env=env, run=tmp_path)
    if why is None:
        assert found[0] == str(program)
    else:
        assert why in found
    nobody = find_scope("kimi", GIB, env={"PATH": env["PATH"]}, run=tmp_path / "none")
    assert isinstance(nobody, str)
    assert find_scope("kimi", GIB, env={"PATH": str(tmp_path)}, run=tmp_path) == "systemd-run is not installed"


def test_doctor_says_what_would_be_left() -> None:
    allowed = os.sched_getaffinity(0)
    assert core_finding(0, EngineConfig(), allowed) is None
    one = core_finding(1, EngineConfig(), allowed)
    assert one is not None
    assert one.severity == "fine"
    off = core_finding(1, EngineConfig(pin_cores=False), allowed)
    assert off is not None
    assert off.severity == "advice"
    most = core_finding(100_000, EngineConfig(), allowed)
    assert most is not None
    assert most.severity == "problem"
    assert memory_finding(0) is None
    limited = memory_finding(GIB)
    assert limited is not None
    assert limited.severity == ("fine" if "limits engines to" in limited.seen else "advice")


def test_options_go_before_the_configuration() -> None:
    said = ReserveConfig(cores=3, ram_bytes=64 * GIB)
    assert GoalOptions().goal_for("llama.cpp").reserve_cores == 0
    goal = GoalOptions().reserving(said).goal_for("llama.cpp")
    assert (goal.reserve_cores, goal.reserve_ram_bytes) == (3, 64 * GIB)
    other = GoalOptions(reserve_cores=0, reserve_ram=GIB).reserving(said).goal_for("llama.cpp")
    assert (other.reserve_cores, other.reserve_ram_bytes) == (0, GIB)
