"""Checks of the processors: clocks, heat, and instructions that the engine's build leaves unused."""

from tokenmill.doctor.check_result import CheckResult, Remedy, since, sysfs
from tokenmill.doctor.facts import Facts
from tokenmill.planner.memory.weights import WHEEL_ISA

_GOVERNOR = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_PREFERENCE = "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference"
_CLOCKS = "kernel documentation, admin-guide/pm/cpufreq"
_BATCH_WIDE = ("avx512f", "amx_int8", "avx_vnni")


def governor(facts: Facts) -> CheckResult:
    """Whether the processors are allowed to run as fast as they can."""
    clocks = facts.clocks
    if not clocks.governors:
        where = "the hypervisor's host decides" if facts.machine.virtual else "the kernel shows no cpufreq"
        return CheckResult("governor", "unknown", f"how clocks are chosen is not visible: {where}")
    slow = {name: count for name, count in clocks.governors.items() if name != "performance"}
    dim = {name: count for name, count in clocks.preferences.items() if name != "performance"}
    if clocks.boost is False:
        return CheckResult(
            "governor",
            "advice",
            "turbo (boost) is switched off",
            "the processors stay at their base clock",
            _CLOCKS,
            sysfs("/sys/devices/system/cpu/cpufreq/boost", "1")
            if "intel_pstate" not in clocks.drivers
            else sysfs("/sys/devices/system/cpu/intel_pstate/no_turbo", "0"),
        )
    if not slow:
        return CheckResult("governor", "fine", f"{_counted(clocks.governors)} governor")
    # Drivers that leave the choice to the processor call their only other governor powersave, whatever it prefers.
    own_choice = any(driver.endswith(("_pstate", "-pstate-epp")) for driver in clocks.drivers)
    if own_choice and clocks.preferences and not dim:
        return CheckResult(
            "governor", "fine", f"{_counted(clocks.governors)} governor, and the processor prefers performance"
        )
    seen = f"the governor is {_counted(clocks.governors)}"
    seen += f"; energy preference: {_counted(clocks.preferences)}" if clocks.preferences else ""
    return CheckResult(
        "governor",
        "advice",
        seen,
        "threads wait for each other thousands of times a second, and clocks that fall in a wait must rise again",
        _CLOCKS,
        (*sysfs(_GOVERNOR, "performance"), *(sysfs(_PREFERENCE, "performance")[:1] if dim else ())),
    )


def cpu_throttling(facts: Facts) -> CheckResult | None:
    """Cores that are slowed down for heat."""
    total = facts.after.throttles
    rate = facts.rate("throttles")
    if total is None:
        return (
            None
            if facts.machine.virtual
            else CheckResult(
                "cpu-throttling",
                "unknown",
                "this processor does not count how often it was slowed down for heat",
                remedies=(Remedy("look", "sudo turbostat --show Core,Bzy_MHz,PkgTmp,CoreTmp"),),
            )
        )
    if not total:
        return CheckResult("cpu-throttling", "fine", "no core was slowed down for heat")
    return CheckResult(
        "cpu-throttling",
        "problem" if rate else "advice",
        f"cores were slowed down for heat {total} times{since(facts.kernel.uptime_s)}"
        + (f", {rate:.0f} times in the last second" if rate else ""),
        "the slowest core sets the pace of all",
        remedies=(Remedy("look", "sudo turbostat --show Core,Bzy_MHz,PkgTmp,CoreTmp", note="while an engine works"),),
    )


def instruction_set(facts: Facts) -> CheckResult | None:
    """Instruction sets of the CPU that the engine's build does not use."""
    have = set(facts.machine.cpu.isa)
    if not have:
        return CheckResult("instruction-set", "unknown", "the processor's instruction sets are not known")
    embedded = facts.engine_kind in ("native", "llama-server") and not facts.own_build
    if not embedded or "neon" in have:
        return None
    missing = sorted(WHEEL_ISA - have)
    if missing:
        return CheckResult(
            "instruction-set",
            "problem",
            f"the processor lacks {', '.join(missing)}, which the llama.cpp in the xllamacpp wheel is built for",
            "it ends with an illegal instruction",
            remedies=_own_build(),
        )
    wider = [name for name in _BATCH_WIDE if name in have]
    if not wider:
        return CheckResult("instruction-set", "fine", "the engine's build uses what the processor has")
    avx512 = "avx512f" in have
    return CheckResult(
        "instruction-set",
        "advice",
        f"the processor has {', '.join(wider)}; the llama.cpp in the xllamacpp wheel is built for AVX2",
        ("with AVX-512 a core unpacks about six times as many 4-bit weights a second: " if avx512 else "")
        + "prefill gains, and decoding where it does not wait for memory",
        "docs/forecast.md, unpack_avx512 and unpack_avx2",
        _own_build(),
    )


def _own_build() -> tuple[Remedy, ...]:
    build = "cmake -B build -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON\ncmake --build build -j"
    use = 'library = "/path/to/llama.cpp/build/bin/libllama.so"\nheader = "/path/to/llama.cpp/include/llama.h"'
    return (
        Remedy("for good", build, note="in the source of llama.cpp"),
        Remedy("for good", use, note="in tokenmill.toml, under [engine]"),
    )


def _counted(names: dict[str, int]) -> str:
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{name} on {count} CPUs" for name, count in sorted(names.items(), key=lambda item: -item[1]))
