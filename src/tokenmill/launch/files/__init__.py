"""Writes a command as a runnable file: shell script, podman command, quadlet, systemd service or docker compose."""

from typing import Literal, get_args

from tokenmill.errors import UsageError
from tokenmill.launch.files import containers, services
from tokenmill.launch.files.launch import Launch
from tokenmill.planner.plan import Command, Plan

RunKind = Literal["shell", "podman", "quadlet", "systemd", "compose"]
KINDS: tuple[RunKind, ...] = get_args(RunKind)

_WRITERS = {
    "shell": services.write_shell,
    "podman": containers.write_podman,
    "quadlet": containers.write_quadlet,
    "systemd": services.write_systemd,
    "compose": containers.write_compose,
}


def write_as(kind: str, command: Command, plan: Plan, *, name: str | None = None, image: str | None = None) -> str:
    """Write a command as one of KINDS. `name`: of the service or container; `image`: of the container."""
    if kind not in _WRITERS:
        raise UsageError(f"unknown kind of launch file {kind!r}", hint=f"use one of {', '.join(KINDS)}")
    return _WRITERS[kind](Launch.of(command, plan, name=name, image=image))
