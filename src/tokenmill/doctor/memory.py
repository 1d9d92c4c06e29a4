"""Checks of memory: swap, memlock, module speed, huge pages, overcommit."""

from tokenmill.doctor.check_result import LIMITS_FILE, CheckResult, Remedy, since, sysctl, sysfs
from tokenmill.doctor.facts import Facts
from tokenmill.launch.binding import host_bytes, host_weights_bytes
from tokenmill.units import GIB, MIB, format_bytes, format_bytes_s

SWAPPING_BYTES_S = MIB  # slower swapping is ignored
IDLE_PAGES_BYTES = GIB
MUCH_OF_MEMORY = 0.1
_READ_ONCE = "decoding reads every active weight for every token, so its speed is proportional to memory bandwidth"
_FORECAST = "docs/forecast-errors.md"
_SPEED = (
    "set the memory speed or profile (EXPO, XMP) in the BIOS; use one module per channel; the CPU may set a lower limit"
)
_SPEED_WITH_PMEM = "set the memory speed in the BIOS; persistent memory modules limit all others to their own speed"
_ROOT_MODULES = Remedy("look", "sudo tokenmill doctor", note="only root can read the module list")


def swap(facts: Facts) -> CheckResult:
    """Active swapping; swap that is merely in use is fine."""
    machine = facts.machine.swap
    swapped_in = facts.rate("swapped_in_bytes")
    swapped_out = facts.rate("swapped_out_bytes")
    if machine is None or swapped_in is None or swapped_out is None:
        return CheckResult("swap", "unknown", "the kernel shows no swap counters", "vmstat 1 may show them")
    used = machine.used_bytes
    holders = ", ".join(f"{holder} {format_bytes(holder.bytes or 0)}" for holder in facts.swapped)
    amount = "" if used is None else f"{format_bytes(used)} of {format_bytes(machine.total_bytes)} swap in use"
    if max(swapped_in, swapped_out) < SWAPPING_BYTES_S:
        quiet = f"{amount}, not active" if used else "no swap in use"
        return CheckResult("swap", "fine", f"{quiet}{f': {holders}' if holders else ''}")
    return CheckResult(
        "swap",
        "problem",
        f"swapping now: {format_bytes_s(swapped_in)} in, {format_bytes_s(swapped_out)} out; {amount}"
        + (f": {holders}" if holders else ""),
        "every token that needs swapped-out weights waits for the disk",
        remedies=(
            Remedy("look", "ps aux --sort=-rss | head", note="shows the largest processes"),
            Remedy("now", f"{facts.planning} --reserve-ram '64 GiB'", note="plans with memory left for other programs"),
            Remedy("now", "sudo swapoff -a && sudo swapon -a", note="moves everything back to memory, if it fits"),
        ),
    )


def memlock(facts: Facts) -> CheckResult:
    """The limit of locked memory, compared with the plan."""
    if not facts.memlock_known:
        return CheckResult("memlock", "unknown", "/proc/self/limits cannot be read", "ulimit -l shows the limit")
    limit = facts.memlock_bytes
    plan = facts.model.plan if facts.model else None
    if limit is None:
        return CheckResult("memlock", "fine", "locked memory is not limited")
    need = host_weights_bytes(plan) if plan else None
    if need is not None and limit >= need:
        return CheckResult(
            "memlock", "fine", f"locked memory: up to {format_bytes(limit)}; the plan needs {format_bytes(need)}"
        )
    wanted = plan is not None and plan.settings.mlock
    planned = "" if need is None else f"; the plan keeps {format_bytes(need)} of weights in memory"
    return CheckResult(
        "memlock",
        "problem" if wanted else "advice",
        f"locked memory: up to {format_bytes(limit)}{planned}",
        "--mlock fails" if wanted else "--mlock, which prevents weights from being swapped out, would fail",
        remedies=(
            Remedy("now", "sudo prlimit --pid $$ --memlock=unlimited", note="for this shell and its children"),
            Remedy(
                "for good", f'echo "$USER - memlock unlimited" | sudo tee -a {LIMITS_FILE}', note="then log in again"
            ),
            Remedy("for good", "LimitMEMLOCK=infinity", note="in the [Service] of a systemd unit"),
        ),
    )


def memory_speed(facts: Facts) -> CheckResult | None:
    """Memory modules that run below their rated speed."""
    dram = facts.machine.dram
    rated = [dimm.rated_mts for dimm in dram.dimms if dimm.rated_mts]
    if facts.machine.virtual:
        return None  # both speeds are properties of the hypervisor's host
    if dram.mts is None or not rated:
        return CheckResult(
            "memory-speed",
            "unknown",
            "the speed of the memory modules is unknown",
            "decoding speed depends on it",
            remedies=(_ROOT_MODULES,),
        )
    best = min(rated)
    if best <= dram.mts:
        return CheckResult("memory-speed", "fine", f"the memory modules run at their rated {dram.mts} MT/s")
    return CheckResult(
        "memory-speed",
        "advice",
        f"the memory modules run at {dram.mts} MT/s but are rated for {best}: {100 - 100 * dram.mts / best:.0f} % of "
        "the bandwidth is not used",
        _READ_ONCE,
        _FORECAST,
        (Remedy("by hand", _SPEED_WITH_PMEM if facts.machine.pmem else _SPEED),),
    )


def memory_channels(facts: Facts) -> CheckResult | None:
    """Empty memory channels."""
    filled = facts.machine.dram.channels
    board = facts.board_channels
    if facts.machine.virtual:
        return None
    if filled is None or board is None:
        return CheckResult(
            "memory-channels",
            "unknown",
            "the number of memory channels in use is unknown",
            "the slot names do not show the channels, or only root can read them",
            remedies=(_ROOT_MODULES,),
        )
    if filled >= board:
        return CheckResult("memory-channels", "fine", f"all {board} memory channels are in use")
    return CheckResult(
        "memory-channels",
        "problem",
        f"{board - filled} of {board} memory channels are empty",
        f"{_READ_ONCE}: {100 * filled / board:.0f} % of the board's maximum",
        _FORECAST,
        (Remedy("by hand", "install a module of the same kind in every channel"),),
    )


def huge_pages(facts: Facts) -> CheckResult:
    """Transparent huge pages, which speed up weights that are read into memory but not mapped ones."""
    pages = facts.machine.huge_pages
    setting = pages.transparent if pages else None
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if setting is None:
        return CheckResult("huge-pages", "unknown", f"{path} cannot be read")
    if setting == "always":
        return CheckResult("huge-pages", "fine", "transparent huge pages: always")
    plan = facts.model.plan if facts.model else None
    if plan is not None and plan.settings.mmap:
        return CheckResult(
            "huge-pages", "fine", f"transparent huge pages: {setting}; they do not affect the mapped file of the plan"
        )
    return CheckResult(
        "huge-pages",
        "advice",
        f"transparent huge pages: {setting}, and llama.cpp does not request them",
        "weights read with --no-mmap use pages of 4 KiB; with 2 MiB one machine went from 8.0 to 9.0 tok/s",
        "ik_llama.cpp pull 278",
        sysfs(path, "always"),
    )


def reserved_pages(facts: Facts) -> CheckResult | None:
    """Reserved but unused huge pages, which no other program can use."""
    if not facts.pools:
        return None
    idle = sum(pool.page_bytes * (pool.free or 0) for pool in facts.pools)
    kept = sum(pool.page_bytes * pool.total for pool in facts.pools)
    if all(pool.free is None for pool in facts.pools):
        return CheckResult(
            "reserved-pages", "unknown", f"{format_bytes(kept)} reserved as huge pages; their use is unknown"
        )
    if idle < IDLE_PAGES_BYTES:
        return CheckResult("reserved-pages", "fine", f"{format_bytes(kept)} reserved as huge pages, in use")
    total = facts.machine.dram.total_bytes
    much = total is not None and idle > MUCH_OF_MEMORY * total
    folder = "/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages"
    release = (
        Remedy("now", f"echo {pool.total - pool.free} | sudo tee {folder.format(pool.page_bytes >> 10)}")
        for pool in facts.pools
        if pool.free
    )
    return CheckResult(
        "reserved-pages",
        "problem" if much else "advice",
        f"{format_bytes(idle)} of {format_bytes(kept)} reserved as huge pages are unused",
        "only programs that request such pages can use that memory, and llama.cpp does not",
        "kernel documentation, mm/hugetlbpage",
        (
            *release,
            Remedy("by hand", "remove hugepages= from the kernel command line, vm.nr_hugepages from sysctl.d"),
        ),
    )


def overcommit(facts: Facts) -> CheckResult:
    """Strict overcommit, in which the kernel refuses allocations beyond its commit limit."""
    mode = facts.kernel.overcommit_memory
    plan = facts.model.plan if facts.model else None
    if mode is None:
        return CheckResult("overcommit", "unknown", "vm.overcommit_memory cannot be read")
    if mode != 2:
        return CheckResult("overcommit", "fine", f"vm.overcommit_memory is {mode}")
    limit = facts.kernel.commit_limit_bytes
    used = facts.kernel.committed_bytes
    left = None if limit is None or used is None else limit - used
    need = host_bytes(plan) if plan and not plan.settings.mmap else None
    short = left is not None and need is not None and need > left
    rest = "" if left is None else f": {format_bytes(max(0, left))} can still be allocated"
    return CheckResult(
        "overcommit",
        "problem" if short else "advice",
        f"vm.overcommit_memory is 2{rest}" + (f", the plan needs {format_bytes(need)}" if need else ""),
        "allocations count before they are used, and engines allocate more memory than they use",
        "kernel documentation, mm/overcommit-accounting",
        sysctl("vm.overcommit_memory", 0),
    )


def oom_kills(facts: Facts) -> CheckResult:
    """Processes that the kernel killed because memory ran out."""
    system = facts.kernel.oom_kills
    own = facts.groups[0].oom_kills if facts.groups else None
    if system is None and own is None:
        return CheckResult("oom-kills", "unknown", "the kernel does not count out-of-memory kills (before 4.13)")
    if not system and not own:
        return CheckResult("oom-kills", "fine", f"no out-of-memory kills{since(facts.kernel.uptime_s)}")
    ours = f" ({own} in this control group)" if own else ""
    killed = max(system or 0, own or 0)
    return CheckResult(
        "oom-kills",
        "advice",
        f"the kernel killed {killed} process{'' if killed == 1 else 'es'} because memory ran out{ours}"
        f"{since(facts.kernel.uptime_s)}",
        "an engine that exceeds its planned memory is killed without a line in its own log",
        remedies=(
            Remedy("look", "sudo journalctl -k -g 'Killed process'", note="shows the processes, times and sizes"),
        ),
    )
