"""Enforces the cores and the memory that a plan reserves for other programs.

  cores    CPU affinity, and a cpuset if control groups can be created
  memory   memory.max of a control group if one can be created, else of a systemd scope; else a note for the user

The memory limit is the total minus the reserve, not the predicted need: pages of a mapped model are charged to the
group that reads them first, and a limit near the need would make the kernel evict weights that are needed again soon.
It is memory.max and not memory.high, so that an engine that exceeds its plan is killed with a clear cause and
restarted, instead of slowing down for hours.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.cgroup import Cgroup, find_home, find_scope, in_own_cpuset, make_group, memory_limit_of
from tokenmill.engine.limits.cores import Division, cores_here, cores_of, cpus_for, divide
from tokenmill.engine.limits.scheduling import preparation
from tokenmill.engine.process import exit_status
from tokenmill.engine.process.identity import descendants
from tokenmill.engine.process.preparation import Preparation
from tokenmill.hardware.host import LocalHost
from tokenmill.launch.binding import binding
from tokenmill.planner.plan import Decision, Plan
from tokenmill.units import GIB, format_bytes, format_ranges, number_of

CoresBy = Literal["affinity", "control group", "container"]
MemoryBy = Literal["control group", "systemd scope", "container"]
_SCOPE: MemoryBy = "systemd scope"
_PROC = Path("/proc")
_VLLM_BIND = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class AppliedLimits:
    """The limits of an engine and the mechanisms that enforce them. Stored in reserve.json."""

    cores: int  # reserved cores
    ram_bytes: int  # reserved memory
    cpus: tuple[int, ...] | None = None  # logical CPUs of the engine; None: not limited
    left: tuple[int, ...] = ()  # reserved logical CPUs
    cores_by: CoresBy | None = None
    memory_max_bytes: int | None = None  # None: not limited
    memory_by: MemoryBy | None = None
    lacking: tuple[str, ...] = ()  # a sentence per limit that is not enforced: why, and how to enforce it

    def describe(self) -> tuple[str, ...]:
        """One sentence for each limit, enforced or not."""
        words = []
        if self.cpus is not None:
            words.append(
                f"{number_of(self.cores, 'core')} ({_cpus(self.left)}) reserved for other programs: the engine and "
                f"tokenmill use {_cpus(self.cpus)} (enforced by {self.cores_by})"
            )
        if self.memory_max_bytes is not None:
            words.append(
                f"{format_bytes(self.ram_bytes)} reserved for other programs: the engine may use "
                f"{format_bytes(self.memory_max_bytes)} (enforced by {self.memory_by})"
            )
        return (*words, *self.lacking)


@dataclass(frozen=True, slots=True)
class PreparedLimits:
    """How to start a process with its limits."""

    preparation: Preparation | None  # None for containers, whose processes are not children of the supervisor
    applied: AppliedLimits | None = None  # None: nothing is reserved
    own_cpus: tuple[int, ...] | None = None  # CPUs of this process itself
    wrapper: tuple[str, ...] = ()  # arguments in front of the command
    cleanup_command: tuple[str, ...] = ()  # command to run after the process has exited
    env: tuple[tuple[str, str], ...] = ()
    group: Path | None = None

    def undo(self) -> None:
        """Remove the control group of a process that was not started."""
        if self.group is not None:
            with suppress(OSError):
                self.group.rmdir()


def prepare_limits(plan: Plan, config: EngineConfig, *, name: str, contained: bool = False) -> PreparedLimits:
    """Prepare the limits of an engine before its start; creates a control group if that is permitted."""
    cores = plan.goal.reserve_cores
    ram = plan.goal.reserve_ram_bytes
    if contained:
        return _contained(plan)
    division = local_division(plan)
    if not cores and not ram:
        return PreparedLimits(preparation(plan, config, division=division))
    pinned = cores > 0 and config.pin_cores is not False
    cpus = preparation(plan, config, division=division).cpus if pinned else None
    kept = AppliedLimits(cores, ram)
    if cpus is not None and division is not None:
        kept = replace(kept, cpus=cpus, left=division.left, cores_by="affinity")
    elif cores:
        kept = replace(kept, lacking=(_no_cores(plan, config),))
    limit = local_limit(ram)
    group, before = _place(name, limit, cpus)
    if isinstance(group, Cgroup):
        kept = replace(kept, cores_by="control group" if group.cpuset else kept.cores_by)
        if ram:
            kept = replace(kept, memory_max_bytes=group.memory_max_bytes, memory_by="control group")
    elif before:
        kept = replace(kept, memory_max_bytes=limit, memory_by=_SCOPE)
    elif ram:
        kept = replace(kept, lacking=(*kept.lacking, _no_limit(ram, limit, group or "")))
    folder = group.folder if isinstance(group, Cgroup) else None
    return PreparedLimits(
        preparation(plan, config, division=division, group=None if folder is None else str(folder)),
        kept,
        division.cpus if division is not None and cpus is not None else None,
        before,
        () if folder is None else ("rmdir", str(folder)),
        () if cpus is None or division is None else ((_VLLM_BIND, format_ranges(division.first_cpus)),),
        folder,
    )


def local_division(plan: Plan) -> Division | None:
    """Divide the cores of this machine; None if no cores are reserved, or all would be."""
    if not plan.goal.reserve_cores:
        return None
    nodes = binding(plan).nodes
    cores = cores_here(LocalHost()) or cores_of(plan.machine)
    home = nodes[0] if nodes else None
    return divide(cores, plan.goal.reserve_cores, allowed=os.sched_getaffinity(0), home=home)


def decisions(plan: Plan, config: EngineConfig, *, here: bool = True) -> tuple[Decision, ...]:
    """The reserves as decisions of a plan; applies nothing.

    here: the plan is for this machine, so its kernel is asked for cores and limits.
    """
    found = []
    ram = plan.goal.reserve_ram_bytes
    division = local_division(plan) if here else divide(cores_of(plan.machine), plan.goal.reserve_cores)
    cpus = cpus_for(plan, config.pin_cores, binding(plan), division)
    if plan.goal.reserve_cores and cpus is not None and division is not None:
        found.append(
            Decision("cpus", format_ranges(cpus), f"{format_ranges(division.left)} reserved for other programs")
        )
    limit = limit_for(ram, exit_status.memory_limit_bytes() if here else plan.machine.dram.total_bytes)
    if limit is not None:
        why = f"{format_bytes(ram)} reserved for other programs, if a limit can be set"
        found.append(Decision("memory limit", format_bytes(limit), why))
    return tuple(found)


def local_limit(ram_bytes: int) -> int | None:
    """`limit_for` this machine, or the container that this process runs in."""
    return limit_for(ram_bytes, exit_status.memory_limit_bytes())


def limit_for(ram_bytes: int, total: int | None) -> int | None:
    """Memory limit of engines for a reserve; None if nothing is reserved or the total is unknown or too small."""
    return None if not ram_bytes or total is None or total <= ram_bytes else total - ram_bytes


def memory_mechanism(ram_bytes: int) -> tuple[MemoryBy | None, str]:
    """How a memory limit would be enforced here, or None and why it cannot be. Changes nothing."""
    limit = local_limit(ram_bytes)
    if limit is None:
        return None, _no_limit(ram_bytes, None, "")
    home = find_home()
    if not isinstance(home, str):
        return "control group", ""
    scope = find_scope("trial", limit)
    return (None, _no_limit(ram_bytes, limit, f"{home}, and {scope}")) if isinstance(scope, str) else (_SCOPE, "")


def restrict_to_cpus(cpus: tuple[int, ...]) -> None:
    """Restrict all threads of this process to these CPUs; new threads inherit it."""
    for folder in (_PROC / "self/task").iterdir():
        with suppress(OSError):  # the thread may have exited
            os.sched_setaffinity(int(folder.name), cpus)


def verified(kept: AppliedLimits, pid: int) -> AppliedLimits:
    """Check the limits of a running engine and its descendants in the kernel; returns those that are enforced."""
    if kept.cpus is not None and kept.cores_by != "container":
        strays = _strays((pid, *descendants(pid)), set(kept.cpus))
        if strays:
            why = f"{number_of(strays, 'thread')} of the engine may run on reserved CPUs"
            kept = replace(kept, cpus=None, cores_by=None, lacking=(*kept.lacking, why))
        else:
            kept = replace(kept, cores_by="control group" if in_own_cpuset(pid) else "affinity")
    if kept.memory_max_bytes is not None and kept.memory_by != "container":
        limit = memory_limit_of(pid)
        if limit is None or limit > kept.memory_max_bytes:
            why = _no_limit(kept.ram_bytes, kept.memory_max_bytes, f"the {kept.memory_by} does not have this limit")
            kept = replace(kept, memory_max_bytes=None, memory_by=None, lacking=(*kept.lacking, why))
        else:
            kept = replace(kept, memory_max_bytes=limit)
    return kept


def _place(name: str, limit: int | None, cpus: tuple[int, ...] | None) -> tuple[Cgroup | str | None, tuple[str, ...]]:
    """Create a control group, else return the arguments of a systemd scope; a string says why neither is possible."""
    if limit is None and cpus is None:
        return None, ()
    home = find_home()
    made = home if isinstance(home, str) else make_group(home, name, memory_max_bytes=limit, cpus=cpus)
    if isinstance(made, Cgroup) or limit is None:
        return made, ()
    scope = find_scope(name, limit)
    return (f"{made}, and {scope}", ()) if isinstance(scope, str) else (None, scope)


def _contained(plan: Plan) -> PreparedLimits:
    """Limits of a container, which its runtime enforces."""
    cores = plan.goal.reserve_cores
    ram = plan.goal.reserve_ram_bytes
    bound = binding(plan)
    if not cores and not ram:
        return PreparedLimits(None)
    kept = AppliedLimits(cores, ram)
    own = None
    if bound.cpus is not None:
        mine = set(bound.cpus)
        all_cores = cores_here(LocalHost()) or cores_of(plan.machine)
        own = tuple(cpu for core in all_cores if mine & {*core.cpus} for cpu in core.cpus)
        left = tuple(cpu for core in all_cores if not mine & {*core.cpus} for cpu in core.cpus)
        kept = replace(kept, cpus=bound.cpus, left=left, cores_by="container")
    if ram:
        kept = replace(kept, memory_max_bytes=bound.memory_max_bytes, memory_by="container")
    return PreparedLimits(None, kept, own)


def _strays(pids: tuple[int, ...], cpus: set[int]) -> int:
    strays = 0
    for pid in pids:
        with suppress(OSError):
            for task in (_PROC / str(pid) / "task").iterdir():
                with suppress(OSError):
                    strays += not os.sched_getaffinity(int(task.name)) <= cpus
    return strays


def _no_cores(plan: Plan, config: EngineConfig) -> str:
    cores = number_of(plan.goal.reserve_cores, "core")
    if config.pin_cores is False:
        return f"{cores} reserved only by the number of threads, because engine.pin_cores = false"
    return f"{cores} cannot be reserved: this process has too few cores, or the kernel does not list them"


def _no_limit(ram_bytes: int, limit: int | None, why: str) -> str:
    left = f"{format_bytes(ram_bytes)} reserved only by the plan, not enforced"
    if limit is None:
        return f"{left}: this machine has too little memory, or its size is unknown"
    return (
        f"{left}: {why} (to enforce it, set MemoryMax={limit // GIB}G or Delegate=yes in a systemd unit; see "
        "docs/coexistence.md)"
    )


def _cpus(numbers: tuple[int, ...]) -> str:
    return f"CPU{'' if len(numbers) == 1 else 's'} {format_ranges(numbers)}" if numbers else "none"
