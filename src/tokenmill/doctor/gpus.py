"""Checks of GPUs: library support, PCIe links, memory in use, power limits and reduced clocks."""

from collections.abc import Sequence
from dataclasses import replace

from tokenmill.doctor.check_result import CheckResult, Remedy
from tokenmill.doctor.facts import Facts, GpuState, MemoryHolder
from tokenmill.hardware.machine import Gpu
from tokenmill.planner.plan import Plan
from tokenmill.units import format_bytes, format_gb_s, format_ranges

_LINKS = "sudo lspci -vv -d ::0300 | grep -E 'LnkCap:|LnkSta:'"
_PERFORMANCE = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
BUSY = 0.5
MUCH_USED = 0.1
SLOWED_S = 1.0
_HARMLESS = {
    "gpu_idle",
    "applications_clocks_setting",
    "sync_boost",
    "display_clocks_setting",
    "sw_power_cap",
    "unknown",
}
_WORDS = {
    "hw_slowdown": "the GPU's own protection (heat or power)",
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power supply",
    "sw_thermal_slowdown": "heat",
    "sw_therm_slowdown": "heat",
    "hw_therm_slowdown": "heat",
    "hw_power_brake": "the power supply",
}
_LINK_WHY = "prefill copies host experts over this link, and decoding sends activations of every layer over it"


def gpu_library(facts: Facts) -> CheckResult | None:
    """Whether the llama.cpp library in use was built with support for the GPUs."""
    if not any(gpu.vram_bytes for gpu in facts.machine.gpus) or facts.engine_kind not in ("native", "llama-server"):
        return None
    unused = facts.unused_gpus
    if unused is None:
        return CheckResult("gpu-library", "fine", "the llama.cpp library in use supports the GPUs, or is your own")
    remedy = Remedy("now", unused.command) if unused.command else Remedy("by hand", unused.remedy)
    return CheckResult(
        "gpu-library",
        "problem",
        unused.seen,
        "run, serve and tune compute everything on the CPU",
        remedies=(remedy,),
    )


def gpu_link(facts: Facts) -> CheckResult | None:
    """PCIe links below the capability of GPU and slot."""
    gpus = [gpu for gpu in facts.machine.gpus if gpu.pcie.width is not None]
    if not facts.machine.gpus:
        return None
    if not gpus:
        return CheckResult(
            "gpu-link", "unknown", "the driver does not report PCIe links", remedies=(Remedy("look", _LINKS),)
        )
    narrow = [gpu for gpu in gpus if gpu.pcie.narrow]
    slow = [gpu for gpu in gpus if gpu.pcie.slow]
    working = [gpu for gpu in slow if (_state(facts, gpu).utilization or 0.0) >= BUSY]
    if narrow:
        return _narrow(facts, narrow)
    if working:
        gpu = working[0]
        return CheckResult(
            "gpu-link",
            "problem",
            f"GPU {_indices(working)} runs PCIe {gpu.pcie.generation}.0 of {gpu.pcie.max_generation}.0 under load",
            _LINK_WHY,
            remedies=_link_remedies(facts),
        )
    older = [gpu for gpu in gpus if (gpu.pcie.max_generation or 99) < (_state(facts, gpu).device_generation or 0)]
    if older:
        gpu = older[0]
        best = _state(facts, gpu).device_generation
        return CheckResult(
            "gpu-link",
            "advice",
            f"GPU {_indices(older)} supports PCIe {best}.0, but the slot only {gpu.pcie.max_generation}.0",
            _LINK_WHY,
            remedies=_link_remedies(facts),
        )
    idle = f"; GPU {_indices(slow)} is idle at a lower PCIe generation, so check it again under load" if slow else ""
    best_link = gpus[0].pcie
    return CheckResult("gpu-link", "fine", f"links use their full width of {best_link.width} lanes{idle}")


def gpu_memory(facts: Facts) -> CheckResult | None:
    """GPU memory held by other programs, compared with the plan if there is one."""
    gpus = [gpu for gpu in facts.machine.gpus if gpu.vram_bytes]
    if not gpus:
        return None
    if any(gpu.free_bytes is None for gpu in gpus):
        return CheckResult("gpu-memory", "unknown", "the driver does not report free GPU memory")
    return _any_use(facts, gpus) if facts.model is None else _use_beyond_plan(facts, gpus, facts.model.plan)


def _any_use(facts: Facts, gpus: Sequence[Gpu]) -> CheckResult:
    full = [gpu for gpu in gpus if (gpu.free_bytes or 0) < (1 - MUCH_USED) * (gpu.vram_bytes or 0)]
    if not full:
        return CheckResult(
            "gpu-memory", "fine", f"GPU {_indices(gpus)}: at least {1 - MUCH_USED:.0%} of the memory is free"
        )
    own = {state.record.engine.pid for state in facts.engines if state.alive}
    holders = [holder for gpu in full for holder in _state(facts, gpu).holders]
    seen = "; ".join(_used(facts, gpu) for gpu in full)
    if holders and all(holder.pid in own for holder in holders):
        return CheckResult("gpu-memory", "fine", f"{seen}, all engines of tokenmill")
    return CheckResult("gpu-memory", "advice", seen, "plans use only free memory", remedies=_kill_remedies(facts, full))


def _use_beyond_plan(facts: Facts, gpus: Sequence[Gpu], plan: Plan) -> CheckResult:
    short = []
    for gpu in gpus:
        rows = [row for row in plan.ledger.full_context if row.tier == f"gpu{gpu.index}" and row.item != "reserve"]
        need = sum(row.bytes for row in rows)
        if need > (gpu.free_bytes or 0):
            short.append((gpu, need))
    if not short:
        return CheckResult("gpu-memory", "fine", "the plan fits in the free memory of every GPU")
    seen = "; ".join(f"the plan needs {format_bytes(need)} on {_used(facts, gpu)}" for gpu, need in short)
    return CheckResult(
        "gpu-memory",
        "problem",
        seen,
        "loading fails, or the first long prompt",
        remedies=_kill_remedies(facts, [gpu for gpu, _ in short]),
    )


def gpu_power(facts: Facts) -> CheckResult | None:
    """Power limits below the GPU's default."""
    states = facts.gpu_states
    if not _nvidia(facts):
        return None
    known = [state for state in states or () if state.power_limit_w and state.default_power_limit_w]
    if not known:
        return CheckResult("gpu-power", "unknown", "nvidia-smi does not report power limits")
    lower = [state for state in known if (state.power_limit_w or 0) < (state.default_power_limit_w or 0)]
    if not lower:
        return CheckResult("gpu-power", "fine", f"power limits are at their default, {known[0].power_limit_w:.0f} W")
    first = lower[0]
    chosen = ",".join(str(state.index) for state in lower)
    return CheckResult(
        "gpu-power",
        "advice",
        f"GPU {_numbers(lower)} is limited to {first.power_limit_w:.0f} W of {first.default_power_limit_w:.0f} W",
        "it slows down prefill and large batches, but hardly single sequences; keep it if it is intended",
        remedies=(Remedy("now", f"sudo nvidia-smi -i {chosen} -pl {first.default_power_limit_w:.0f}"),),
    )


def gpu_persistence(facts: Facts) -> CheckResult | None:
    """Disabled persistence mode, in which the driver releases an unused GPU."""
    if not _nvidia(facts):
        return None
    known = [state for state in facts.gpu_states or () if state.persistent is not None]
    if not known:
        return CheckResult("gpu-persistence", "unknown", "nvidia-smi does not report the persistence mode")
    off = [state for state in known if not state.persistent]
    if not off:
        return CheckResult("gpu-persistence", "fine", "persistence mode is on")
    return CheckResult(
        "gpu-persistence",
        "advice",
        f"persistence mode is off on GPU {_numbers(off)}",
        "the driver unloads when no program uses a GPU: the next start waits for it, and power limits are lost",
        "NVIDIA driver documentation, Driver Persistence",
        (
            Remedy("now", "sudo nvidia-smi -pm 1"),
            Remedy("for good", "sudo systemctl enable --now nvidia-persistenced"),
        ),
    )


def gpu_throttling(facts: Facts) -> CheckResult | None:
    """Clocks reduced by heat or power."""
    if not _nvidia(facts):
        return None
    states = facts.gpu_states
    if states is None:
        return CheckResult(
            "gpu-throttling",
            "unknown",
            "nvidia-smi does not answer, so reduced clocks cannot be detected",
            remedies=(Remedy("look", _PERFORMANCE),),
        )
    now = [state for state in states if set(state.slowed_by) - _HARMLESS]
    if now:
        reasons = sorted({_WORDS.get(name, name) for state in now for name in set(state.slowed_by) - _HARMLESS})
        heat = ", ".join(f"{state.temperature_c:.0f} C" for state in now if state.temperature_c is not None)
        return CheckResult(
            "gpu-throttling",
            "problem",
            f"GPU {_numbers(now)} is slowed down by {' and '.join(reasons)}" + (f", at {heat}" if heat else ""),
            "all work on that GPU is slower",
            remedies=(Remedy("look", _PERFORMANCE),),
        )
    past = [
        (state, name, seconds)
        for state in states
        for name, seconds in state.slowed_s.items()
        if name not in _HARMLESS and seconds >= SLOWED_S
    ]
    if past:
        state, name, seconds = max(past, key=lambda entry: entry[2])
        return CheckResult(
            "gpu-throttling",
            "advice",
            f"GPU {state.index} was slowed down by {_WORDS.get(name, name)} for {seconds:.0f} s so far",
            "all work on that GPU was slower during that time",
            remedies=(Remedy("look", _PERFORMANCE, note="while an engine runs"),),
        )
    return CheckResult("gpu-throttling", "fine", "clocks are not reduced")


def _narrow(facts: Facts, gpus: Sequence[Gpu]) -> CheckResult:
    gpu = gpus[0]
    now = replace(gpu.pcie, max_width=gpu.pcie.width).nominal_gb_s
    best = gpu.pcie.nominal_gb_s
    rates = f", {format_gb_s(now)} of {format_gb_s(best)}" if now is not None and best is not None else ""
    return CheckResult(
        "gpu-link",
        "problem",
        f"GPU {_indices(gpus)} uses {gpu.pcie.width} of {gpu.pcie.max_width} PCIe lanes{rates}",
        _LINK_WHY,
        remedies=_link_remedies(facts),
    )


def _link_remedies(facts: Facts) -> tuple[Remedy, ...]:
    look = "nvidia-smi -q | grep -A10 'GPU Link Info'" if _nvidia(facts) else _LINKS
    return (
        Remedy("look", look, note="under load"),
        Remedy("by hand", "use another slot without riser or bifurcation; set the slot's PCIe generation in the BIOS"),
    )


def _kill_remedies(facts: Facts, gpus: Sequence[Gpu]) -> tuple[Remedy, ...]:
    holders = {holder.pid: holder for gpu in gpus for holder in _state(facts, gpu).holders}
    if not holders:
        return (Remedy("look", "nvidia-smi", note="lists the processes; run it as root to see all"),)
    return tuple(
        Remedy("now", f"kill {holder.pid}", note=f"if {holder.name} is not needed") for holder in holders.values()
    )


def _used(facts: Facts, gpu: Gpu) -> str:
    total = gpu.vram_bytes or 0
    free = gpu.free_bytes or 0
    by = ", ".join(_holds(holder) for holder in _state(facts, gpu).holders)
    return f"GPU {gpu.index}: {format_bytes(free)} of {format_bytes(total)} free" + (f", used by {by}" if by else "")


def _holds(holder: MemoryHolder) -> str:
    return f"{holder}" + ("" if holder.bytes is None else f" {format_bytes(holder.bytes)}")


def _state(facts: Facts, gpu: Gpu) -> GpuState:
    states = facts.gpu_states or ()
    return next((state for state in states if gpu.vendor == "nvidia" and state.index == gpu.index), GpuState(gpu.index))


def _nvidia(facts: Facts) -> bool:
    return any(gpu.vendor == "nvidia" for gpu in facts.machine.gpus)


def _indices(gpus: Sequence[Gpu]) -> str:
    return format_ranges([gpu.index for gpu in gpus])


def _numbers(states: Sequence[GpuState]) -> str:
    return format_ranges([state.index for state in states])
