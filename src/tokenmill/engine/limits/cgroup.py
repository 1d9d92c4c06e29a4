"""Limits engines with a control group (version 2) or a systemd scope.

    HOME                        a group delegated to this process, or the root group if no service manager runs
      tokenmill-command         this process, because a group with members cannot enable controllers for its children
      tokenmill-engines         memory.max of all engines together
        NAME.N.PID.TICKS        cpuset.cpus of one engine, the Nth that process PID started

The engine's supervisor removes its group; if it is killed, the next start does. Groups that are not delegated are never
changed, even if they are writable, because the service manager would undo the changes.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tokenmill.engine.process.identity import Pid, boot_id, descendants
from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.units import MIB, format_ranges, number_of

ENGINES = "tokenmill-engines"
COMMAND = "tokenmill-command"
_PROC = Path("/proc")
_MANAGED = Path("/run/systemd/system")
_numbers = count()  # a restarted engine must not use the group that the last supervisor removes
_DELEGATED = ("user.delegate", "trusted.delegate")  # extended attributes that systemd sets on delegated groups


@dataclass(frozen=True, slots=True)
class Home:
    """A group in which this process may create groups."""

    folder: Path
    occupied: bool  # this process is in it and must leave it first


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one engine."""

    folder: Path
    memory_max_bytes: int | None  # of all engines together; None: not limited
    cpuset: bool  # the CPUs are enforced by cpuset.cpus


def find_home(proc: Path = _PROC, managed: Path = _MANAGED) -> Home | str:
    """Find a group in which groups can be created, or return why there is none."""
    mount = _mount(proc)
    path = _path(proc)
    if mount is None or path is None:
        return "cgroup v2 is not available"
    own = mount / path.lstrip("/")
    if ".." in own.parts or not own.is_dir():
        return "the control group of this process is not visible"
    if "memory" not in _words(mount / "cgroup.controllers"):
        return "cgroup v2 has no memory controller"
    parent_too = own.parent != mount or own.name == COMMAND
    homes = [own, *([own.parent] if parent_too else [])]
    home = next((folder for folder in homes if _is_ours(folder, mount, managed)), None)
    return f"the control group {path} is not delegated" if home is None else _usable_home(home)


def make_group(home: Home, name: str, *, memory_max_bytes: int | None, cpus: Iterable[int] | None) -> Cgroup | str:
    """Create a group for an engine and set its limits; returns the kernel's error if that fails."""
    engines = home.folder / ENGINES
    try:
        if home.occupied:
            _move_out(home.folder)
        (home.folder / "cgroup.subtree_control").write_text("+memory")
        cpuset = _enable(home.folder, "cpuset")
        engines.mkdir(exist_ok=True)
        sweep(engines)
        limit = _shared_limit(engines, memory_max_bytes)
        (engines / "memory.max").write_text("max" if limit is None else str(limit))
        cpuset = cpuset and _enable(engines, "cpuset")
        folder = engines / f"{name}.{next(_numbers)}.{_me()}"
        folder.mkdir()
    except OSError as error:
        return f"{error.filename or home.folder}: {error.strerror or error}"
    if cpuset and cpus is not None:
        try:
            (folder / "cpuset.cpus").write_text(format_ranges(cpus))
        except OSError:
            cpuset = False
    return Cgroup(folder, limit, cpuset and cpus is not None)


def sweep(engines: Path) -> None:
    """Remove the groups of processes that have exited; the kernel keeps groups with running processes."""
    for folder in sorted(engines.iterdir()):
        if folder.is_dir() and not _creator_is_alive(folder.name):
            with suppress(OSError):
                folder.rmdir()


def memory_limit_of(pid: int, proc: Path = _PROC) -> int | None:
    """The smallest memory.max of a process's group and its parents; None if there is no limit or it is not visible."""
    mount = _mount(proc)
    path = _path(proc, str(pid))
    if mount is None or path is None:
        return None
    folder = mount / path.lstrip("/")
    limits = list[int]()
    while folder.is_relative_to(mount) and ".." not in folder.parts:
        limit = _text(folder / "memory.max").strip()
        limits += [int(limit)] if limit.isdigit() else []
        if folder == mount:
            break
        folder = folder.parent
    return min(limits, default=None)


def in_own_cpuset(pid: int, proc: Path = _PROC) -> bool:
    """Whether a process is in a group of tokenmill with a cpuset."""
    mount = _mount(proc)
    path = _path(proc, str(pid))
    if mount is None or path is None or Path(path).parent.name != ENGINES:
        return False
    return bool(_text(mount / path.lstrip("/") / "cpuset.cpus").strip())


def _is_ours(folder: Path, mount: Path, managed: Path) -> bool:
    if folder == mount:
        return not managed.exists()  # the root group belongs to the service manager, if there is one
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _usable_home(home: Path) -> Home | str:
    if "memory" not in _words(home / "cgroup.controllers"):
        return f"the control group {home} has no memory controller"
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        if not os.access(home / name, os.W_OK):
            return f"{home / name} is not writable"
    members = {int(word) for word in _words(home / "cgroup.procs") if word.isdigit()}
    root = not (home / "cgroup.type").exists()
    if not members or root:  # only the root group may have both members and children with controllers
        return Home(home, occupied=False)
    others = members - {os.getpid(), *descendants(os.getpid())}
    if others:
        return f"{number_of(len(others), 'other process', 'other processes')} in the delegated control group"
    return Home(home, occupied=True)


def _move_out(home: Path) -> None:
    leaf = home / COMMAND
    leaf.mkdir(exist_ok=True)
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(str(pid))


def _enable(folder: Path, controller: str) -> bool:
    if controller not in _words(folder / "cgroup.controllers"):
        return False
    try:
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError:
        return False
    return True


def _shared_limit(engines: Path, wanted: int | None) -> int | None:
    """The limit of all engines together: while other engines run, the smallest one."""
    now = _text(engines / "memory.max").strip()
    others = any(folder.is_dir() for folder in engines.iterdir())
    limits = [wanted] if wanted is not None else []
    limits += [int(now)] if others and now.isdigit() else []
    return min(limits, default=None)


def _me() -> str:
    me = Pid.here(os.getpid())
    return f"{os.getpid()}.{me.ticks if me is not None else 0}"


def _creator_is_alive(name: str) -> bool:
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not all(part.isdigit() for part in parts[1:]):
        return True  # not created by tokenmill
    return Pid(int(parts[1]), int(parts[2]), boot_id()).alive


def _mount(proc: Path) -> Path | None:
    found = [one for one in parse_mountinfo(_text(proc / "self/mountinfo")) if one.filesystem == "cgroup2"]
    return Path(found[0].point) if found else None


def _path(proc: Path, who: str = "self") -> str | None:
    lines = _text(proc / who / "cgroup").splitlines()
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)


def _words(path: Path) -> set[str]:
    return set(_text(path).split())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_SYSTEMD_TIMEOUT_S = 30.0


def scope_arguments(name: str, memory_max_bytes: int, *, root: bool, program: str = "systemd-run") -> tuple[str, ...]:
    """The systemd-run arguments that run a command in a scope."""
    return (
        program,
        *(() if root else ("--user",)),
        "--scope",
        "--quiet",
        "--collect",
        "--no-ask-password",
        f"--description=tokenmill engine {name}",
        f"--property=MemoryMax={memory_max_bytes // MIB}M",
        "--",
    )


def find_scope(
    name: str, memory_max_bytes: int, *, env: Mapping[str, str] | None = None, run: Path = Path("/run")
) -> tuple[str, ...] | str:
    """Return systemd-run arguments after a trial run, or why scopes cannot be used."""
    env = os.environ if env is None else env
    root = os.geteuid() == 0
    program = shutil.which("systemd-run", path=env.get("PATH"))
    if program is None:
        return "systemd-run is not installed"
    runtime = env.get("XDG_RUNTIME_DIR")
    if root and not (run / "systemd/system").is_dir():
        return "systemd is not running"
    if not root and (not runtime or not (Path(runtime) / "systemd/private").exists()):
        return "no user instance of systemd is running (loginctl enable-linger starts one)"
    words = scope_arguments(name, memory_max_bytes, root=root, program=program)
    try:
        done = subprocess.run(
            [*words, "true"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SYSTEMD_TIMEOUT_S,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd-run did not finish ({error})"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return f"systemd-run failed: {lines[-1]}" if lines else f"systemd-run exited with {done.returncode}"
    return words
