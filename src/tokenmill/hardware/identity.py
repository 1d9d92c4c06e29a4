"""Identifies a machine, because measurements are valid on one machine only."""

import hashlib
import json
from collections import Counter

from tokenmill.hardware.machine import Machine
from tokenmill.units import format_bytes

_SAME_MEMORY = 1.02  # the kernel reports slightly different totals after an update


def machine_id(machine: Machine) -> str:
    """A hash of CPUs, memory and GPUs, independent of the machine's name and current limits."""
    gpus = sorted((gpu.name, gpu.vram_bytes) for gpu in machine.gpus)
    parts = (
        machine.cpu.model,
        machine.cpu.sockets,
        machine.cpu.cores,
        machine.dram.total_bytes,
        machine.dram.mts,
        machine.pmem.total_bytes if machine.pmem else None,
        gpus,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def differences(claimed: Machine, here: Machine) -> list[str]:
    """What a described machine claims to have and the machine `here` lacks; less memory than here is no difference."""
    found = list[str]()
    for name, theirs, ours in (
        ("CPU", claimed.cpu.model, here.cpu.model),
        ("sockets", claimed.cpu.sockets, here.cpu.sockets),
        ("cores", claimed.cpu.cores, here.cpu.cores),
    ):
        if theirs is not None and ours is not None and theirs != ours:
            found.append(f"{name} {theirs}, here {ours}")
    theirs_bytes, ours_bytes = claimed.dram.total_bytes, here.dram.total_bytes
    if theirs_bytes is not None and ours_bytes is not None and theirs_bytes > _SAME_MEMORY * ours_bytes:
        found.append(f"{format_bytes(theirs_bytes)} of RAM, here {format_bytes(ours_bytes)}")
    missing = Counter(gpu.name for gpu in claimed.gpus) - Counter(gpu.name for gpu in here.gpus)
    found += [f"{number} x {name}, which is not here" for name, number in missing.items()]
    return found
