"""Facts about a model for the checks: its plan on this machine, cached bytes, and the disk's read rate."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from tokenmill.doctor.facts import ModelNeeds
from tokenmill.engine.residency import resident
from tokenmill.errors import ModelError
from tokenmill.hardware.machine import Machine, Measurements
from tokenmill.model.profile import Profile
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.units import MIB

READ_S = 0.4
READ_BYTES = 4 * MIB
READERS = 4
MIN_FILE_BYTES = 256 * MIB  # smaller files are read too quickly to measure the disk


def model_facts(
    name: str, machine: Machine, profile: Profile, goal: Goal, *, measured: Measurements | None = None
) -> ModelNeeds:
    """Plan a model and examine its files; `measured` comes from the machine file."""
    plan = make(replace(machine, measured=measured or machine.measured), profile, goal)
    paths = tuple(Path(file.path) for file in profile.files if Path(file.path).is_file())
    found = []
    for path in paths:
        try:
            found.append(resident(path))
        except ModelError:  # loading reports the error
            break
    known = len(found) == len(paths) and all(one.bytes is not None for one in found)
    nominal = machine.disk.nominal_gb_s if machine.disk else None
    rate = plan.machine.measured.gb_s("disk") if plan.machine.measured else None
    if rate is None and paths:
        rate = read_gb_s(max(paths, key=lambda path: path.stat().st_size))
    return ModelNeeds(
        name=name,
        plan=plan,
        paths=paths,
        cached_bytes=sum(one.bytes or 0 for one in found) if found and known else None,
        file_bytes=sum(one.total_bytes for one in found) if found and known else None,
        disk_gb_s=rate if rate is not None else nominal,
        disk_measured=rate is not None,
    )


def read_gb_s(path: Path, seconds: float = READ_S) -> float | None:
    """Read rate of a file, bypassing the page cache; None if it cannot be measured."""
    status = path.stat()
    if status.st_size < MIN_FILE_BYTES or status.st_blocks * 512 < status.st_size * 0.95:
        return None  # too small, or with holes, which are not read from disk
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    began = perf_counter()

    def read(reader: int) -> int:
        buffer = mmap.mmap(-1, READ_BYTES)  # page-aligned, as O_DIRECT requires
        part = status.st_size // READERS // READ_BYTES * READ_BYTES
        done = 0
        while done < part and perf_counter() - began < seconds:
            done += os.preadv(descriptor, [buffer], reader * part + done)
        return done

    try:
        with ThreadPoolExecutor(READERS) as pool:
            total = sum(pool.map(read, range(READERS)))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return total / (perf_counter() - began) / 1e9 if total else None
