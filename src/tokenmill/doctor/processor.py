"""Checks of the CPU: clocks, heat, and instruction sets that the engine's build does not use."""

from tokenmill.doctor.check_result import CheckResult, Remedy, since, sysfs
from tokenmill.doctor.facts import Facts
from tokenmill.planner.memory.weights import WHEEL_ISA

_GOVERNOR = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_PREFERENCE = "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference"
_CLOCKS = "kernel documentation, admin-guide/pm/cpufreq"
_BATCH_WIDE = ("avx512f", "amx_int8", "avx_vnni")


def governor(facts: Facts) -> CheckResult:
    """Frequency governor, energy preference and turbo."""
    clocks = facts.clocks
    if not clocks.governors:
        where = "the hypervisor's host sets them" if facts.machine.virtual else "the kernel has no cpufreq"
        return CheckResult("governor", "unknown", f"CPU frequency settings are not visible: {where}")
    slow = {name: count for name, count in clocks.governors.items() if name != "performance"}
    saving = {name: count for name, count in clocks.preferences.items() if name != "performance"}
    if clocks.boost is False:
        return CheckResult(
            "governor",
            "advice",
            "turbo (boost) is switched off",
            "the CPU stays at its base clock",
            _CLOCKS,
            sysfs("/sys/devices/system/cpu/cpufreq/boost", "1")
            if "intel_pstate" not in clocks.drivers
            else sysfs("/sys/devices/system/cpu/intel_pstate/no_turbo", "0"),
        )
    if not slow:
        return CheckResult("governor", "fine", f"{_counted(clocks.governors)} governor")
    # With drivers that leave the frequency to the CPU, the governor powersave also covers a preference for performance.
    cpu_decides = any(driver.endswith(("_pstate", "-pstate-epp")) for driver in clocks.drivers)
    if cpu_decides and clocks.preferences and not saving:
        return CheckResult(
            "governor", "fine", f"{_counted(clocks.governors)} governor with a preference for performance"
        )
    seen = f"the governor is {_counted(clocks.governors)}"
    seen += f"; energy preference: {_counted(clocks.preferences)}" if clocks.preferences else ""
    return CheckResult(
        "governor",
        "advice",
        seen,
        "threads wait for each other thousands of times per second, and clocks that drop meanwhile rise slowly",
        _CLOCKS,
        (*sysfs(_GOVERNOR, "performance"), *(sysfs(_PREFERENCE, "performance")[:1] if saving else ())),
    )


def cpu_throttling(facts: Facts) -> CheckResult | None:
    """Thermal throttling of CPU cores."""
    total = facts.after.throttles
    rate = facts.rate("throttles")
    if total is None:
        return (
            None
            if facts.machine.virtual
            else CheckResult(
                "cpu-throttling",
                "unknown",
                "this CPU does not count thermal throttling",
                remedies=(Remedy("look", "sudo turbostat --show Core,Bzy_MHz,PkgTmp,CoreTmp"),),
            )
        )
    if not total:
        return CheckResult("cpu-throttling", "fine", "no thermal throttling")
    return CheckResult(
        "cpu-throttling",
        "problem" if rate else "advice",
        f"cores were thermally throttled {total} times{since(facts.kernel.uptime_s)}"
        + (f", {rate:.0f} times in the last second" if rate else ""),
        "all threads wait for the slowest core",
        remedies=(Remedy("look", "sudo turbostat --show Core,Bzy_MHz,PkgTmp,CoreTmp", note="while an engine runs"),),
    )


def instruction_set(facts: Facts) -> CheckResult | None:
    """Instruction sets of the CPU that the engine's build does not use."""
    have = set(facts.machine.cpu.isa)
    if not have:
        return CheckResult("instruction-set", "unknown", "the CPU's instruction sets are unknown")
    embedded = facts.engine_kind in ("native", "llama-server") and not facts.own_build
    if not embedded or "neon" in have:
        return None
    missing = sorted(WHEEL_ISA - have)
    if missing:
        return CheckResult(
            "instruction-set",
            "problem",
            f"the CPU lacks {', '.join(missing)}, which the llama.cpp of the xllamacpp wheel requires",
            "the engine crashes with an illegal instruction",
            remedies=_own_build(),
        )
    wider = [name for name in _BATCH_WIDE if name in have]
    if not wider:
        return CheckResult("instruction-set", "fine", "the engine's build uses the CPU's instruction sets")
    avx512 = "avx512f" in have
    return CheckResult(
        "instruction-set",
        "advice",
        f"the CPU supports {', '.join(wider)}; the llama.cpp of the xllamacpp wheel is built for AVX2",
        ("with AVX-512 a core unpacks about six times as many 4-bit weights per second, so " if avx512 else "")
        + "prefill gets faster, and so does decoding unless it waits for memory",
        "docs/forecast-errors.md, unpack_avx512 and unpack_avx2",
        _own_build(),
    )


def _own_build() -> tuple[Remedy, ...]:
    return (Remedy("for good", "tokenmill engines build", note="native and llama-server then use this build"),)


def _counted(names: dict[str, int]) -> str:
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{name} on {count} CPUs" for name, count in sorted(names.items(), key=lambda item: -item[1]))
