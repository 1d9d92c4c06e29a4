"""A POSIX shell script: `sh NAME.sh` runs the engine, `sh NAME.sh health` asks it whether it is ready."""

import shlex

from tokenmill.launch.binding import Binding
from tokenmill.launch.files.launch import Launch, grouped

WIDTH = 100  # a list of overrides is broken where it would be longer


def write(launch: Launch) -> str:
    """The script."""
    program, *flags = grouped(list(launch.command.argv))
    lines = [
        *heading(launch),
        'if [ "${1:-}" = health ]; then',
        f"  exec curl --fail --silent --show-error --max-time 5 {launch.health_url}",
        "fi",
        *([_UNLOCK] if launch.mlock else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in launch.command.env.items()),
        joined([f"exec {prefix(launch.binding)}{shlex.join(program)}", *map(words, flags)]),
    ]
    return "\n".join(lines) + "\n"


_UNLOCK = 'ulimit -l unlimited || echo "memory cannot be locked: raise memlock in /etc/security/limits.conf" >&2'


def heading(launch: Launch, *notes: str | None) -> list[str]:
    """First lines of every script."""
    comments = [launch.title, *launch.comments, *filter(None, notes)]
    return ["#!/bin/sh", *(f"# {comment}" for comment in comments), "set -eu", ""]


def prefix(bound: Binding) -> str:
    """numactl or taskset in front of a program."""
    cpus = bound.cpu_list
    if not bound.numa:
        return f"taskset --cpu-list {cpus} " if cpus else ""
    memory = "--interleave=all" if bound.interleave else f"--membind={bound.node_list}"
    processors = f"--physcpubind={cpus}" if cpus else "" if bound.interleave else f"--cpunodebind={bound.node_list}"
    return " ".join(filter(None, ("numactl", processors, memory))) + " "


def joined(parts: list[str]) -> str:
    """Words of one command, one flag a line."""
    return " \\\n  ".join(parts)


def words(group: list[str]) -> str:
    """A flag and its values, quoted; a long list of overrides gets a line for each."""
    text = shlex.join(group)
    if len(text) <= WIDTH or len(group) != 2 or "=" not in group[1]:
        return text
    # adjacent quotes with nothing between them are one word: the lines must start at the margin
    clauses = [shlex.quote(f"{clause},") for clause in group[1].split(",")[:-1]]
    return f"{group[0]} " + "\\\n".join([*clauses, shlex.quote(group[1].split(",")[-1])])
