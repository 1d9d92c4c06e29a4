"""Checks of this process's limits: control groups, shared memory, open files."""

from tokenmill.doctor.check_result import LIMITS_FILE, CheckResult, Remedy
from tokenmill.doctor.facts import CgroupFacts, Facts
from tokenmill.launch.binding import host_bytes
from tokenmill.units import GIB, format_bytes

_SHM = "/dev/shm"  # noqa: S108  its size is the question
MIN_SHM_BYTES = GIB  # the default of containers is 64 MiB
MIN_FILES = 1024
MAX_THROTTLED = 0.05  # share of scheduling periods


def memory_limit(facts: Facts) -> CheckResult:
    """A control group's memory limit below the machine's memory or the plan's."""
    total = facts.machine.dram.total_bytes
    limit = facts.machine.limits.cgroup_memory_bytes
    highs = [group.high_bytes for group in facts.groups if group.high_bytes is not None]
    high = min((size for size in highs if total is None or size < total), default=None)
    lowest = min((size for size in (limit, high) if size is not None), default=None)
    if lowest is None:
        return _unlimited("memory-limit", "no control group limits memory", facts)
    need = host_bytes(facts.model.plan) if facts.model else None
    soft = lowest == high and lowest != limit
    of = "" if total is None else f" of the machine's {format_bytes(total)}"
    seen = f"the control group is limited to {format_bytes(lowest)}{of}" + (" (memory.high)" if soft else "")
    if need is not None and need <= lowest:
        return CheckResult("memory-limit", "fine", f"{seen}; the plan needs {format_bytes(need)}")
    effect = "above it the kernel throttles the group" if soft else "above it the kernel kills the engine"
    by = next((group for group in facts.groups if lowest in (group.max_bytes, group.high_bytes)), None)
    key = "MemoryHigh" if soft else "MemoryMax"
    return CheckResult(
        "memory-limit",
        "advice" if need is None else "problem",
        seen + ("" if need is None else f", and the plan needs {format_bytes(need)}"),
        f"{effect}; pages of a mapped model count, too",
        "kernel documentation, admin-guide/cgroup-v2",
        _remedies(facts, by, f"{key}=infinity", "--memory=0"),
    )


def cpu_limit(facts: Facts) -> CheckResult:
    """A CPU quota or CPU set below the machine's cores."""
    quota = facts.machine.limits.cgroup_cpus
    cpuset = facts.machine.limits.cpuset
    if quota is None and cpuset is None:
        return _unlimited("cpu-limit", "no control group limits CPU time", facts)
    throttles = facts.rate("quota_throttles")
    periods = facts.rate("quota_periods")
    hit = bool(throttles and periods and throttles > MAX_THROTTLED * periods)
    parts = [] if quota is None else [f"a CPU quota of {quota:g}"]
    parts += [] if cpuset is None else [f"{len(cpuset)} logical CPUs"]
    has = f"this process has {' and '.join(parts)}"
    threads = facts.model.plan.settings.threads if facts.model else None
    few = threads is not None and any(threads > size for size in (quota, len(cpuset) if cpuset else None) if size)
    if threads is not None and not hit and not few:
        return CheckResult("cpu-limit", "fine", f"{has}, enough for {threads} threads")
    by = next((group for group in facts.groups if quota is not None and group.cpus == quota), None)
    return CheckResult(
        "cpu-limit",
        "problem" if hit or few else "advice",
        f"{has} on a machine with {facts.machine.cpu.cores or 'an unknown number of'} cores"
        + (", and is being throttled" if hit else "")
        + (f"; the plan runs {threads} threads" if few else ""),
        "the threads of an engine synchronize after every operation, so throttling one of them delays all",
        remedies=(
            *_remedies(facts, by, "CPUQuota=" if quota is not None else "AllowedCPUs=", "--cpus=0"),
            Remedy("now", f"{facts.planning} --threads N", note="with no more threads than that"),
        ),
    )


def shared_memory(facts: Facts) -> CheckResult:
    """The size of shared memory, through which processes of vLLM and NCCL communicate."""
    size = facts.shm_bytes
    if size is None:
        return CheckResult("shared-memory", "unknown", f"{_SHM} cannot be read", "vLLM and NCCL need it")
    if size >= MIN_SHM_BYTES:
        return CheckResult("shared-memory", "fine", f"{_SHM} holds {format_bytes(size)}")
    vllm = facts.engine_kind == "vllm" or (facts.model is not None and facts.model.plan.settings.engine == "vllm")
    return CheckResult(
        "shared-memory",
        "problem" if vllm else "advice",
        f"{_SHM} holds {format_bytes(size)}",
        "vLLM workers and NCCL exchange data through it and fail when it is full",
        "vLLM documentation, Using Docker",
        (
            Remedy("for good", "--shm-size 16g", note="for podman run or docker run; alternatively --ipc=host"),
            Remedy("now", "sudo mount -o remount,size=16G /dev/shm", note="outside a container"),
        ),
    )


def open_files(facts: Facts) -> CheckResult:
    """The limit of open files and connections."""
    soft = facts.open_files
    hard = facts.open_files_hard
    if soft is None and facts.memlock_known:
        return CheckResult("open-files", "fine", "open files are not limited")
    if soft is None:
        return CheckResult("open-files", "unknown", "the limit of open files is unknown")
    if soft >= MIN_FILES:
        return CheckResult("open-files", "fine", f"up to {soft} open files")
    return CheckResult(
        "open-files",
        "advice",
        f"up to {soft} open files" + ("" if hard is None else f" (hard limit {hard})"),
        "every connection and every split of a model needs one",
        remedies=(
            Remedy("now", f"ulimit -n {min(hard or 65536, 65536)}", note="for this shell and its children"),
            Remedy("for good", f'echo "$USER - nofile 65536" | sudo tee -a {LIMITS_FILE}', note="then log in again"),
        ),
    )


def _unlimited(check: str, words: str, facts: Facts) -> CheckResult:
    if facts.groups_seen:
        return CheckResult(check, "fine", words)
    return CheckResult(check, "unknown", "/proc/self/cgroup cannot be read, so limits are unknown")


def _remedies(facts: Facts, by: CgroupFacts | None, setting: str, option: str) -> tuple[Remedy, ...]:
    """Commands that remove a limit; `by` is the control group that sets it."""
    if facts.machine.container:
        return (Remedy("for good", f"podman run {option} ...", note="or slightly more than the plan needs"),)
    unit = (by.unit if by else None) or "UNIT"
    return (
        Remedy("now", f"sudo systemctl set-property --runtime {unit} {setting}"),
        Remedy("for good", f"sudo systemctl set-property {unit} {setting}"),
    )
