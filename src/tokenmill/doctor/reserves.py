"""Checks of CPU and memory reserves, for `tokenmill doctor` and `status`: current limits of running engines and the
limits that a new engine would get.
"""

from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.doctor.check_result import CheckResult, Remedy
from tokenmill.engine.limits.cores import cores_here, divide
from tokenmill.engine.limits.reserve import AppliedLimits, local_limit, memory_mechanism
from tokenmill.engine.limits.start import current_limits
from tokenmill.engine.process import registry
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.units import GIB, format_bytes, format_ranges, number_of

_WHY = "a reserve is only guaranteed to other programs if a limit prevents the engine from using it"


def reserves_now(state: Path) -> dict[str, AppliedLimits]:
    """Limits of running engines with a reserve, by name."""
    found = {record.name: current_limits(state, record) for record in registry.listed(state)}
    return {name: kept for name, kept in found.items() if kept is not None}


def running_findings(state: Path) -> list[CheckResult]:
    """One result for each engine that runs with a reserve."""
    return [
        CheckResult(
            "reserve",
            "advice" if kept.lacking else "fine",
            f"engine {name}: {'; '.join(kept.describe())}",
            _WHY if kept.lacking else None,
        )
        for name, kept in reserves_now(state).items()
    ]


def core_finding(cores: int, config: EngineConfig, allowed: set[int], host: Host | None = None) -> CheckResult | None:
    """Whether `cores` cores can be kept free, and which; None if none are reserved."""
    if not cores:
        return None
    words = number_of(cores, "core")
    if config.pin_cores is False:
        return CheckResult(
            "reserve-cores",
            "advice",
            f"{words} reserved, but engine.pin_cores is false: the engine has fewer threads, which run on any core",
            _WHY,
            remedies=(Remedy("by hand", "remove engine.pin_cores from tokenmill.toml"),),
        )
    division = divide(cores_here(host or LocalHost()), cores, allowed=allowed)
    if division is None:
        return CheckResult(
            "reserve-cores",
            "problem",
            f"{words} reserved, but this process can use no more than that",
            _WHY,
            remedies=(Remedy("by hand", "set a smaller reserve.cores in tokenmill.toml, or --reserve-cores"),),
        )
    return CheckResult(
        "reserve-cores",
        "fine",
        f"{words} reserved: engines run on CPUs {format_ranges(division.cpus)}, other programs can use "
        f"{format_ranges(division.left)}",
    )


def memory_finding(ram_bytes: int) -> CheckResult | None:
    """Whether `ram_bytes` can be kept free, and by which limit; None if no memory is reserved."""
    if not ram_bytes:
        return None
    way, why_not = memory_mechanism(ram_bytes)
    limit = local_limit(ram_bytes)
    if way is not None and limit is not None:
        return CheckResult(
            "reserve-ram",
            "fine",
            f"{format_bytes(ram_bytes)} reserved: {way} limits engines to {format_bytes(limit)}",
        )
    remedies = (
        ()
        if limit is None
        else (
            Remedy("for good", f"MemoryMax={limit // GIB}G", note="in the [Service] of the unit that runs tokenmill"),
            Remedy(
                "for good", "Delegate=yes", note="in the same [Service] instead: tokenmill then limits only the engines"
            ),
            Remedy("now", f"podman run --memory {limit // GIB}g ...", note="in a container"),
        )
    )
    return CheckResult("reserve-ram", "advice", why_not, _WHY, remedies=remedies)
