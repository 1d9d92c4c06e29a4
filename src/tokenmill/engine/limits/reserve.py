"""Enforces the cores and the memory that a plan reserves for other programs.

  cores    affinity, which a process may set for its children; also a cpuset if control groups can be created
  memory   memory.max of a control group if one can be created, else of a systemd scope; else a note for the user

The memory limit is the total minus the reserve, not the plan's own need: pages of a mapped model count for the group
that read them first, and a limit near the need would make the kernel drop weights that are read again soon. A plan that
fits stays below it by the operating system's share. It is memory.max and not memory.high, so that an engine that
exceeds its plan is killed with a clear cause and restarted instead of slowing down for hours.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenmill.config import EngineConfig
from tokenmill.engine.limits.cgroup import Cgroup, find_home, find_scope, in_cpuset_of_ours, make_group, memory_limit_of
from tokenmill.engine.limits.cores import Division, cores_here, cores_of, cpus_for, divide
from tokenmill.engine.limits.scheduling import preparation
from tokenmill.engine.process import exit_status
from tokenmill.engine.process.identity import descendants
from tokenmill.engine.process.preparation import Preparation
from tokenmill.hardware.host import LocalHost
from tokenmill.launch.binding import binding, ranges
from tokenmill.planner.plan import Decision, Plan
from tokenmill.units import GIB, format_bytes, number_of

CoresBy = Literal["affinity", "control group", "container"]
MemoryBy = Literal["control group", "systemd scope", "container"]
_SCOPE: MemoryBy = "systemd scope"
_PROC = Path("/proc")
_VLLM_BIND = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class AppliedLimits:
    """The reserve of an engine and the mechanisms that enforce it."""

    cores: int  # cores to reserve
    ram_bytes: int
    cpus: tuple[int, ...] | None = None  # logical CPUs of the engine; None: not limited
    left: tuple[int, ...] = ()
    cores_by: CoresBy | None = None
    memory_max_bytes: int | None = None  # None: not limited
    memory_by: MemoryBy | None = None
    lacking: tuple[str, ...] = ()  # one sentence for each limit that is not enforced: the reason and how to enforce it

    def as_words(self) -> tuple[str, ...]:
        """Return one sentence for each limit, enforced or not."""
        words = []
        if self.cpus is not None:
            words.append(
                f"{number_of(self.cores, 'core')} ({_cpus(self.left)}) left to other programs: the engine and what "
                f"starts it keep to {_cpus(self.cpus)}, by {self.cores_by}"
            )
        if self.memory_max_bytes is not None:
            words.append(
                f"{format_bytes(self.ram_bytes)} left to other programs: the engine may hold "
                f"{format_bytes(self.memory_max_bytes)}, by {self.memory_by}"
            )
        return (*words, *self.lacking)


@dataclass(frozen=True, slots=True)
class Arranged:
    """How a process is to be started so that it leaves what it should."""

    preparation: Preparation | None  # None: a container's processes are not our children
    kept: AppliedLimits | None = None  # None: nothing is reserved
    own_cpus: tuple[int, ...] | None = None  # for this process itself
    before: tuple[str, ...] = ()  # words before the command
    afterwards: tuple[str, ...] = ()  # to run when it has ended
    env: tuple[tuple[str, str], ...] = ()
    group: Path | None = None

    def undo(self) -> None:
        """Remove what was made for a process that never started."""
        if self.group is not None:
            with suppress(OSError):
                self.group.rmdir()


def arrange(plan: Plan, config: EngineConfig, *, name: str, contained: bool = False) -> Arranged:
    """Prepare the limits of an engine before its start: create a control group if that is allowed."""
    cores = plan.goal.reserve_cores
    ram = plan.goal.reserve_ram_bytes
    if contained:
        return _contained(plan)
    division = division_here(plan)
    if not cores and not ram:
        return Arranged(preparation(plan, config, division=division))
    pinned = cores > 0 and config.pin_cores is not False
    cpus = preparation(plan, config, division=division).cpus if pinned else None
    kept = AppliedLimits(cores, ram)
    if cpus is not None and division is not None:
        kept = replace(kept, cpus=cpus, left=division.left, cores_by="affinity")
    elif cores:
        kept = replace(kept, lacking=(_no_cores(plan, config),))
    limit = limit_here(ram)
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
    return Arranged(
        preparation(plan, config, division=division, group=None if folder is None else str(folder)),
        kept,
        division.cpus if division is not None and cpus is not None else None,
        before,
        () if folder is None else ("rmdir", str(folder)),
        () if cpus is None or division is None else ((_VLLM_BIND, ranges(division.first_cpus)),),
        folder,
    )


def division_here(plan: Plan) -> Division | None:
    """Divide the cores of this machine; None if nothing is reserved or the cores are unknown."""
    if not plan.goal.reserve_cores:
        return None
    nodes = binding(plan).nodes
    cores = cores_here(LocalHost()) or cores_of(plan.machine)
    home = nodes[0] if nodes else None
    return divide(cores, plan.goal.reserve_cores, allowed=os.sched_getaffinity(0), home=home)


def decisions(plan: Plan, config: EngineConfig, *, here: bool = True) -> tuple[Decision, ...]:
    """What will be left to others, for the list of a plan's decisions; starts and makes nothing.

    `here`: the plan is for this machine, whose kernel tells more than a description does.
    """
    found = []
    ram = plan.goal.reserve_ram_bytes
    division = division_here(plan) if here else divide(cores_of(plan.machine), plan.goal.reserve_cores)
    cpus = cpus_for(plan, config.pin_cores, binding(plan), division)
    if plan.goal.reserve_cores and cpus is not None and division is not None:
        found.append(Decision("cpus", ranges(cpus), f"{ranges(division.left)} left to other programs"))
    limit = limit_for(ram, exit_status.memory_limit_bytes() if here else plan.machine.dram.total_bytes)
    if limit is not None:
        words = f"{format_bytes(ram)} left to other programs, where a limit can be set"
        found.append(Decision("memory limit", format_bytes(limit), words))
    return tuple(found)


def limit_here(ram_bytes: int) -> int | None:
    """`limit_for` this machine, or the container that we are in."""
    return limit_for(ram_bytes, exit_status.memory_limit_bytes())


def limit_for(ram_bytes: int, total: int | None) -> int | None:
    """What engines may hold so that this much is left; None: nothing is to be left, or the memory is not known."""
    return None if not ram_bytes or total is None or total <= ram_bytes else total - ram_bytes


def memory_way(ram_bytes: int) -> tuple[MemoryBy | None, str]:
    """How a limit would be set here, and what would not be enforced where none can be; makes nothing that stays."""
    limit = limit_here(ram_bytes)
    if limit is None:
        return None, _no_limit(ram_bytes, None, "")
    home = find_home()
    if not isinstance(home, str):
        return "control group", ""
    scope = find_scope("trial", limit)
    return (None, _no_limit(ram_bytes, limit, f"{home}, and {scope}")) if isinstance(scope, str) else (_SCOPE, "")


def keep_off(cpus: tuple[int, ...]) -> None:
    """Keep every thread of this process to these CPUs; later ones inherit it."""
    for folder in (_PROC / "self/task").iterdir():
        with suppress(OSError):  # it may have ended
            os.sched_setaffinity(int(folder.name), cpus)


def seen(kept: AppliedLimits, pid: int) -> AppliedLimits:
    """What of it holds for a running engine and all it started, as the kernel says now."""
    if kept.cpus is not None and kept.cores_by != "container":
        strays = _strays((pid, *descendants(pid)), set(kept.cpus))
        if strays:
            words = f"{number_of(strays, 'thread')} of the engine may run on CPUs that were to be left"
            kept = replace(kept, cpus=None, cores_by=None, lacking=(*kept.lacking, words))
        else:
            kept = replace(kept, cores_by="control group" if in_cpuset_of_ours(pid) else "affinity")
    if kept.memory_max_bytes is not None and kept.memory_by != "container":
        limit = memory_limit_of(pid)
        if limit is None or limit > kept.memory_max_bytes:
            words = _no_limit(kept.ram_bytes, kept.memory_max_bytes, f"the {kept.memory_by} has no such limit")
            kept = replace(kept, memory_max_bytes=None, memory_by=None, lacking=(*kept.lacking, words))
        else:
            kept = replace(kept, memory_max_bytes=limit)
    return kept


def _place(name: str, limit: int | None, cpus: tuple[int, ...] | None) -> tuple[Cgroup | str | None, tuple[str, ...]]:
    """A group of our own, else words for a scope where memory is to be limited; else why there is neither."""
    if limit is None and cpus is None:
        return None, ()
    home = find_home()
    made = home if isinstance(home, str) else make_group(home, name, memory_max_bytes=limit, cpus=cpus)
    if isinstance(made, Cgroup) or limit is None:
        return made, ()
    scope = find_scope(name, limit)
    return (f"{made}, and {scope}", ()) if isinstance(scope, str) else (None, scope)


def _contained(plan: Plan) -> Arranged:
    """A container's limits are its own: the runtime was told the CPUs and the memory."""
    cores = plan.goal.reserve_cores
    ram = plan.goal.reserve_ram_bytes
    bound = binding(plan)
    if not cores and not ram:
        return Arranged(None)
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
    return Arranged(None, kept, own)


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
        return f"{cores} left to other programs by the number of threads alone: engine.pin_cores = false"
    return f"{cores} cannot be left to other programs: this process has no more cores than that, or none are told"


def _no_limit(ram_bytes: int, limit: int | None, why: str) -> str:
    left = f"{format_bytes(ram_bytes)} left to other programs by the plan alone, nothing limits the engine"
    if limit is None:
        return f"{left}: there is no more memory than that here, or its size is not told"
    return f"{left}: {why} (MemoryMax={limit // GIB}G or Delegate=yes in a systemd unit would: docs/coexistence.md)"


def _cpus(numbers: tuple[int, ...]) -> str:
    return f"CPU{'' if len(numbers) == 1 else 's'} {ranges(numbers)}" if numbers else "none"
