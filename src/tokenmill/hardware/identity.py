"""Identifies a machine, because measurements are valid on one machine only."""

import hashlib
import json

from tokenmill.hardware.machine import Machine


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
