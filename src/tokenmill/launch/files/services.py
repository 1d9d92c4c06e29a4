"""Launch files that run on the host itself.

A POSIX shell script (`sh NAME.sh` runs the engine, `sh NAME.sh health` checks it) and a systemd service, which sets
CPUs and memory policy and counts as started once the engine is healthy.
"""

import shlex

from tokenmill.launch.binding import Binding
from tokenmill.launch.files.launch import Launch, grouped
from tokenmill.units import GIB

WIDTH = 100  # longer lists of overrides are split into lines


def write_shell(launch: Launch) -> str:
    """Write a shell script."""
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


_UNLOCK = 'ulimit -l unlimited || echo "cannot lock memory: raise memlock in /etc/security/limits.conf" >&2'


def heading(launch: Launch, *notes: str | None) -> list[str]:
    """The first lines of every script."""
    comments = [launch.title, *launch.comments, *filter(None, notes)]
    return ["#!/bin/sh", *(f"# {comment}" for comment in comments), "set -eu", ""]


def prefix(bound: Binding) -> str:
    """The numactl or taskset prefix of a command."""
    cpus = bound.cpu_list
    if not bound.numa:
        return f"taskset --cpu-list {cpus} " if cpus else ""
    memory = "--interleave=all" if bound.interleave else f"--membind={bound.node_list}"
    processors = f"--physcpubind={cpus}" if cpus else "" if bound.interleave else f"--cpunodebind={bound.node_list}"
    return " ".join(filter(None, ("numactl", processors, memory))) + " "


def joined(parts: list[str]) -> str:
    """Join the arguments of a command, one flag per line."""
    return " \\\n  ".join(parts)


def words(group: list[str]) -> str:
    """Quote a flag and its values; a long list of overrides gets one line per clause."""
    text = shlex.join(group)
    if len(text) <= WIDTH or len(group) != 2 or "=" not in group[1]:
        return text
    # quoted strings continue a word only if the next line is not indented
    clauses = [shlex.quote(f"{clause},") for clause in group[1].split(",")[:-1]]
    return f"{group[0]} " + "\\\n".join([*clauses, shlex.quote(group[1].split(",")[-1])])


def write_systemd(launch: Launch) -> str:
    """Write a systemd unit."""
    lines = [
        f"# /etc/systemd/system/{launch.name}.service",
        *(f"# {comment}" for comment in launch.comments),
        "[Unit]",
        f"Description={specifiers(launch.title)}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={quoted(f'{name}={value}', variables=False)}" for name, value in launch.command.env.items()),
        "ExecStart=" + continued([[quoted(word) for word in group] for group in grouped(list(launch.command.argv))]),
        "# succeeds once the model is loaded",
        "ExecStartPost=curl --fail --silent --output /dev/null --retry-connrefused --retry-delay 5 "
        f"--retry {launch.load_s // 5} {launch.health_url}",
        f"TimeoutStartSec={launch.load_s + 60}",
        "Restart=on-failure",
        "RestartSec=10",
        *bound_to(launch.binding),
        *(["LimitMEMLOCK=infinity"] if launch.mlock else []),
        f"MemoryMax={launch.binding.memory_max_bytes // GIB}G",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def bound_to(bound: Binding) -> list[str]:
    """CPU and memory policy as systemd directives."""
    lines = []
    if bound.cpus:
        lines += [f"AllowedCPUs={bound.cpu_list}", f"CPUAffinity={bound.cpu_list}"]
    if bound.nodes:
        lines += ["NUMAPolicy=bind", f"NUMAMask={bound.node_list}"]
        lines += [] if bound.cpus else ["CPUAffinity=numa"]
    elif bound.interleave:
        lines += ["NUMAPolicy=interleave", "NUMAMask=all"]
    return lines


def continued(groups: list[list[str]]) -> str:
    """Join groups with the line continuation of unit files."""
    return " \\\n    ".join(" ".join(group) for group in groups)


def quoted(word: str, *, variables: bool = True) -> str:
    """Quote a word for a unit file: escapes backslashes, specifiers and (in commands) variables."""
    text = specifiers(word).replace("\\", "\\\\").replace('"', '\\"')
    if variables:
        text = text.replace("$", "$$")
    plain = word and not any(char.isspace() or char in "\"'\\;" for char in word)
    return text if plain else f'"{text}"'


def specifiers(text: str) -> str:
    """Escape percent signs, which start specifiers in unit files."""
    return text.replace("%", "%%")
