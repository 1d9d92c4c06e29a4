"""Reserve checks of `tokenmill doctor` and `status`: limits of running engines, and limits that would apply."""

from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.doctor.check_result import CheckResult, Remedy
from tokenmill.engine.limits.cores import cores_here, divide
from tokenmill.engine.limits.reserve import AppliedLimits, limit_here, memory_way
from tokenmill.engine.limits.start import kept_now
from tokenmill.engine.process import registry
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.launch.binding import ranges
from tokenmill.units import GIB, format_bytes, number_of

_WHY = "other programs get what is reserved because nothing of the engine's may use it, not because it happens not to"


def reserves_now(state: Path) -> dict[str, AppliedLimits]:
    """Limits of running engines with a reserve, by name."""
    found = {record.name: kept_now(state, record) for record in registry.listed(state)}
    return {name: kept for name, kept in found.items() if kept is not None}


def running_findings(state: Path) -> list[CheckResult]:
    """A result for each engine that runs with a reserve."""
    return [
        CheckResult(
            "reserve",
            "advice" if kept.lacking else "fine",
            f"engine {name}: {'; '.join(kept.as_words())}",
            _WHY if kept.lacking else None,
        )
        for name, kept in reserves_now(state).items()
    ]


def core_finding(cores: int, config: EngineConfig, allowed: set[int], host: Host | None = None) -> CheckResult | None:
    """Whether `cores` cores would stay free, and which."""
    if not cores:
        return None
    words = number_of(cores, "core")
    if config.pin_cores is False:
        return CheckResult(
            "reserve-cores",
            "advice",
            f"{words} reserved, and engine.pin_cores is false: the engine has fewer threads, on any core",
            _WHY,
            remedies=(Remedy("by hand", "leave engine.pin_cores out of tokenmill.toml"),),
        )
    division = divide(cores_here(host or LocalHost()), cores, allowed=allowed)
    if division is None:
        return CheckResult(
            "reserve-cores",
            "problem",
            f"{words} reserved, and this process has no more than that",
            _WHY,
            remedies=(Remedy("by hand", "a smaller reserve.cores in tokenmill.toml, or --reserve-cores"),),
        )
    return CheckResult(
        "reserve-cores",
        "fine",
        f"{words} reserved: engines keep to CPUs {ranges(division.cpus)} by affinity, "
        f"{ranges(division.left)} left to other programs",
    )


def memory_finding(ram_bytes: int) -> CheckResult | None:
    """Whether `ram_bytes` would stay free, and by which limit."""
    if not ram_bytes:
        return None
    way, why_not = memory_way(ram_bytes)
    limit = limit_here(ram_bytes)
    if way is not None and limit is not None:
        return CheckResult(
            "reserve-ram",
            "fine",
            f"{format_bytes(ram_bytes)} reserved: engines may hold {format_bytes(limit)} by {way}",
        )
    remedies = (
        ()
        if limit is None
        else (
            Remedy("for good", f"MemoryMax={limit // GIB}G", note="in the [Service] of the unit that runs tokenmill"),
            Remedy("for good", "Delegate=yes", note="there instead: tokenmill then limits engines alone"),
            Remedy("now", f"podman run --memory {limit // GIB}g ...", note="in a container"),
        )
    )
    return CheckResult("reserve-ram", "advice", why_not, _WHY, remedies=remedies)
