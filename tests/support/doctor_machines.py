"""Captured machines for doctor, and facts to change one at a time."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from support.plans import placed, settings
from tokenmill.config import Config
from tokenmill.doctor.facts import CounterSample, Facts, ModelNeeds
from tokenmill.doctor.gather import gather
from tokenmill.hardware.gpu.nvml import NvmlReading
from tokenmill.hardware.machine import Cpu, Disk, Dram, HugePages, Machine, NumaNode
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB
from unit.hardware.conftest import DATA, CapturedHost, load_nvml

DOCTOR = DATA.parent / "doctor"

MACHINE = Machine(
    "test",
    cpu=Cpu(cores=16, threads_per_core=2, isa=("avx2", "fma", "f16c")),
    dram=Dram(total_bytes=768 * GIB),
    numa=(NumaNode(0, tuple(range(32)), 768 * GIB, 700 * GIB),),
    huge_pages=HugePages(transparent="always"),
    disk=Disk("/srv/models", filesystem="ext4", kind="nvme"),
)


def facts(machine: Machine = MACHINE, **changes: Any) -> Facts:
    """A machine with nothing to say of."""
    return Facts(machine, **{"before": CounterSample(0.0), "after": CounterSample(1.0), "groups_seen": True, **changes})


def planned(cards: int = 0, **changes: Any) -> Plan:
    """A real model's plan: everything on the host, or on equal cards."""
    profile = _scout()
    resident = range(profile.layers) if cards else range(0)
    return placed(profile, replace(settings(), repack=False, **changes), cards, resident=resident)


@cache
def _scout() -> Profile:
    return read("llama-4-scout:Q4_K_M")


def model(plan: Plan | None = None, **changes: Any) -> ModelNeeds:
    """A model that is asked about."""
    return ModelNeeds(**{"name": "llama-4-scout:Q4_K_M", "plan": plan or planned(), **changes})


def captured(root: Path, name: str, *more: str, nvml: NvmlReading | None = None) -> CapturedHost:
    """A machine of tests/data/hardware, with captures of tests/data/doctor laid over it."""
    host = CapturedHost(root / name, nvml or load_nvml(DATA / name / "nvml.json"))
    host.unpack((DATA / name / "capture.txt").read_text())
    for extra in more:
        host.unpack((DOCTOR / f"{extra}.txt").read_text())
    return host


def looked_at(host: CapturedHost, *, between: str = "", **options: Any) -> Facts:
    """Gather without waiting; `between` is laid over the machine between the two looks, a second apart."""
    times = iter((100.0, 100.2, 101.0))
    return gather(
        host=host,
        config=Config(state_dir=str(host.root / "state")),
        pause=lambda _: host.unpack(between),
        clock=lambda: next(times),
        **{"path": Path("/home/me/models"), **options},
    )
