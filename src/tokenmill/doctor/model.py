"""Facts about a model for the checks: its plan on this machine, cached bytes, and the disk's read rate."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tokenmill.doctor.facts import ModelNeeds
from tokenmill.engine.residency import resident
from tokenmill.errors import ModelError
from tokenmill.hardware.bandwidth.disk import measure_file
from tokenmill.hardware.machine import Machine, Measurements
from tokenmill.model.profile import Profile
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make

READ_S = 0.5


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
        with suppress(OSError):  # loading reports the error
            measured_rate = measure_file(max(paths, key=lambda path: path.stat().st_size), READ_S)
            rate = measured_rate.gb_s if measured_rate else None
    return ModelNeeds(
        name=name,
        plan=plan,
        paths=paths,
        cached_bytes=sum(one.bytes or 0 for one in found) if found and known else None,
        file_bytes=sum(one.total_bytes for one in found) if found and known else None,
        disk_gb_s=rate if rate is not None else nominal,
        disk_measured=rate is not None,
    )
