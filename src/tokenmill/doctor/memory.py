"""Checks of memory: swap, memlock, module speed, huge pages, overcommit."""

from tokenmill.doctor.check_result import LIMITS_FILE, CheckResult, Remedy, since, sysctl, sysfs
from tokenmill.doctor.facts import Facts
from tokenmill.launch.binding import host_bytes, host_weights_bytes
from tokenmill.units import GIB, MIB, format_bytes

SWAPPING_BYTES_S = MIB  # ignore occasional pages
IDLE_PAGES_BYTES = GIB
MUCH_OF_MEMORY = 0.1
_READ_ONCE = "decoding reads every active weight for every token, so speed follows memory bandwidth"
_FORECAST = "docs/forecast.md"
_SPEED = "the firmware's memory speed or profile (EXPO, XMP); one module a channel; the processor's own limit holds"
_SPEED_WITH_PMEM = "the firmware's memory speed; persistent memory modules hold all others to their own"
_ROOT_MODULES = Remedy("look", "sudo tokenmill doctor", note="only root may read the module list")


def swap(facts: Facts) -> CheckResult:
    """Active swapping, which is worse than full swap."""
    machine = facts.machine.swap
    coming = facts.rate("swapped_in_bytes")
    going = facts.rate("swapped_out_bytes")
    if machine is None or coming is None or going is None:
        return CheckResult("swap", "unknown", "the kernel shows no swap counters", "vmstat 1 shows them in si and so")
    used = machine.used_bytes
    holders = ", ".join(f"{holder} {format_bytes(holder.bytes or 0)}" for holder in facts.swapped)
    amount = "" if used is None else f"{format_bytes(used)} of {format_bytes(machine.total_bytes)} swap in use"
    if max(coming, going) < SWAPPING_BYTES_S:
        quiet = f"{amount}, none moving" if used else "no swap in use"
        return CheckResult("swap", "fine", f"{quiet}{f': {holders}' if holders else ''}")
    return CheckResult(
        "swap",
        "problem",
        f"swapping now: {_mb_s(coming)} in, {_mb_s(going)} out; {amount}" + (f": {holders}" if holders else ""),
        "weights that were swapped out come back at the disk's speed, at every token that needs them",
        remedies=(
            Remedy("look", "ps aux --sort=-rss | head", note="what else fills memory"),
            Remedy("now", f"{facts.planning} --reserve-ram '64 GiB'", note="a plan that leaves room for it"),
            Remedy("now", "sudo swapoff -a && sudo swapon -a", note="brings it all back, if memory has room"),
        ),
    )


def memlock(facts: Facts) -> CheckResult:
    """The memlock limit, compared with the plan."""
    if not facts.memlock_known:
        return CheckResult("memlock", "unknown", "/proc/self/limits cannot be read", "ulimit -l shows the limit")
    limit = facts.memlock_bytes
    plan = facts.model.plan if facts.model else None
    if limit is None:
        return CheckResult("memlock", "fine", "all memory may be locked")
    need = host_weights_bytes(plan) if plan else None
    if need is not None and limit >= need:
        return CheckResult("memlock", "fine", f"{format_bytes(limit)} may be locked, the plan has {format_bytes(need)}")
    wanted = plan is not None and plan.settings.mlock
    beside = "" if need is None else f", and the plan keeps {format_bytes(need)} of weights in memory"
    return CheckResult(
        "memlock",
        "problem" if wanted else "advice",
        f"{format_bytes(limit)} may be locked in memory{beside}",
        "mlock fails" if wanted else "--mlock, which keeps weights from being dropped or swapped out, would fail",
        remedies=(
            Remedy("now", "sudo prlimit --pid $$ --memlock=unlimited", note="this shell and what it starts"),
            Remedy(
                "for good", f'echo "$USER - memlock unlimited" | sudo tee -a {LIMITS_FILE}', note="then log in again"
            ),
            Remedy("for good", "LimitMEMLOCK=infinity", note="in the [Service] of a systemd unit"),
        ),
    )


def memory_speed(facts: Facts) -> CheckResult | None:
    """Modules below their rated speed."""
    dram = facts.machine.dram
    rated = [dimm.rated_mts for dimm in dram.dimms if dimm.rated_mts]
    if facts.machine.virtual:
        return None  # in a virtual machine both belong to the host
    if dram.mts is None or not rated:
        return CheckResult(
            "memory-speed",
            "unknown",
            "the speed of the memory modules is not known",
            "decoding speed follows it",
            remedies=(_ROOT_MODULES,),
        )
    best = min(rated)
    if best <= dram.mts:
        return CheckResult("memory-speed", "fine", f"the modules run at their {dram.mts} MT/s")
    return CheckResult(
        "memory-speed",
        "advice",
        f"the modules are rated for {best} MT/s and run at {dram.mts}: {100 - 100 * dram.mts / best:.0f} % of the "
        "bandwidth is not used",
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
            "which memory channels are filled is not known",
            "slot names do not tell, or only root may read them",
            remedies=(_ROOT_MODULES,),
        )
    if filled >= board:
        return CheckResult("memory-channels", "fine", f"all {board} memory channels are filled")
    return CheckResult(
        "memory-channels",
        "problem",
        f"{board - filled} of {board} memory channels are empty",
        f"{_READ_ONCE}: {100 * filled / board:.0f} % of what the board could give",
        _FORECAST,
        (Remedy("by hand", "put a module of the same kind into every channel"),),
    )


def huge_pages(facts: Facts) -> CheckResult:
    """Transparent huge pages, which help weights that are read into memory but not mapped ones."""
    pages = facts.machine.huge_pages
    setting = pages.transparent if pages else None
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if setting is None:
        return CheckResult("huge-pages", "unknown", f"{path} does not say")
    if setting == "always":
        return CheckResult("huge-pages", "fine", "transparent huge pages are always given")
    plan = facts.model.plan if facts.model else None
    if plan is not None and plan.settings.mmap:
        return CheckResult(
            "huge-pages", "fine", f"transparent huge pages: {setting}; the plan maps its file, where they do not help"
        )
    return CheckResult(
        "huge-pages",
        "advice",
        f"transparent huge pages: {setting}, and llama.cpp does not ask for them",
        "weights read with --no-mmap lie in pages of 4 KiB; with 2 MiB one machine went from 8.0 to 9.0 tok/s",
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
            "reserved-pages", "unknown", f"{format_bytes(kept)} are huge pages; whether idle is not told"
        )
    if idle < IDLE_PAGES_BYTES:
        return CheckResult("reserved-pages", "fine", f"{format_bytes(kept)} are set aside as huge pages, and in use")
    total = facts.machine.dram.total_bytes
    much = total is not None and idle > MUCH_OF_MEMORY * total
    folder = "/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages"
    back = (
        Remedy("now", f"echo {pool.total - pool.free} | sudo tee {folder.format(pool.page_bytes >> 10)}")
        for pool in facts.pools
        if pool.free
    )
    return CheckResult(
        "reserved-pages",
        "problem" if much else "advice",
        f"{format_bytes(idle)} of {format_bytes(kept)} set aside as huge pages are idle",
        "only programs that ask for such pages can use that memory, and llama.cpp does not",
        "kernel documentation, mm/hugetlbpage",
        (*back, Remedy("by hand", "take hugepages= off the kernel's command line, vm.nr_hugepages out of sysctl.d")),
    )


def overcommit(facts: Facts) -> CheckResult:
    """Strict overcommit, with which the kernel refuses allocations beyond its memory."""
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
    room = "" if left is None else f": {format_bytes(max(0, left))} are left to promise"
    return CheckResult(
        "overcommit",
        "problem" if short else "advice",
        f"vm.overcommit_memory is 2{room}" + (f", the plan takes {format_bytes(need)}" if need else ""),
        "memory is refused at the promise, not at its use, and engines ask for more than they touch",
        "kernel documentation, mm/overcommit-accounting",
        sysctl("vm.overcommit_memory", 0),
    )


def oom_kills(facts: Facts) -> CheckResult:
    """Processes killed by the kernel for lack of memory."""
    system = facts.kernel.oom_kills
    own = facts.groups[0].oom_kills if facts.groups else None
    if system is None and own is None:
        return CheckResult("oom-kills", "unknown", "the kernel does not count its kills for memory (before 4.13)")
    if not system and not own:
        return CheckResult("oom-kills", "fine", f"nothing was killed for memory{since(facts.kernel.uptime_s)}")
    ours = f" ({own} in this control group)" if own else ""
    killed = max(system or 0, own or 0)
    return CheckResult(
        "oom-kills",
        "advice",
        f"the kernel killed {killed} process{'' if killed == 1 else 'es'} for memory{ours}"
        f"{since(facts.kernel.uptime_s)}",
        "an engine that needs more than its plan said is ended without a word in its own log",
        remedies=(Remedy("look", "sudo journalctl -k -g 'Killed process'", note="who, when, how large"),),
    )


def _mb_s(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
