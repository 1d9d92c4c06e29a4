"""A control group (version 2) around engines, where this process may make one.

    HOME                        a group that was delegated to us, or the root if no manager owns it
      tokenmill-command         this process, because a group with members cannot hand controllers to groups below it
      tokenmill-engines         memory.max: all engines together leave the reserve
        NAME.N.PID.TICKS        cpuset.cpus: one engine and all it starts, the Nth of the process PID

The engine's supervisor removes its group; the next start removes the group of a supervisor that was killed. Groups
that a service manager manages itself are left alone, writable or not, because it would undo the changes.
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
from tokenmill.launch.binding import ranges
from tokenmill.units import MIB, number_of

ENGINES = "tokenmill-engines"
COMMAND = "tokenmill-command"
_PROC = Path("/proc")
_MANAGED = Path("/run/systemd/system")
_numbers = count()  # an engine that is started again must not get a group that its predecessor's supervisor removes
_DELEGATED = ("user.delegate", "trusted.delegate")  # set by systemd on what it hands over


@dataclass(frozen=True, slots=True)
class Home:
    """A group in which this process may create groups."""

    folder: Path
    crowded: bool  # we are in it and must leave it first


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one engine."""

    folder: Path
    memory_max_bytes: int | None  # of all engines together; None: not limited
    cpuset: bool  # the kernel limits the engine to its CPUs, whatever affinity it sets


def find_home(proc: Path = _PROC, managed: Path = _MANAGED) -> Home | str:
    """Find where groups can be created, or the reason why they cannot."""
    mount = _mount(proc)
    path = _path(proc)
    if mount is None or path is None:
        return "there are no control groups of version 2 here"
    own = mount / path.lstrip("/")
    if ".." in own.parts or not own.is_dir():
        return "the control group of this process cannot be seen from here"
    if "memory" not in _words(mount / "cgroup.controllers"):
        return "control groups of version 2 do not have the memory controller here"
    parent_too = own.parent != mount or own.name == COMMAND
    homes = [own, *([own.parent] if parent_too else [])]
    home = next((folder for folder in homes if _is_ours(folder, mount, managed)), None)
    return f"the control group {path} is not delegated to it" if home is None else _room_in(home)


def make_group(home: Home, name: str, *, memory_max_bytes: int | None, cpus: Iterable[int] | None) -> Cgroup | str:
    """Create a group for an engine and set its limits, or return the kernel's error."""
    engines = home.folder / ENGINES
    try:
        if home.crowded:
            _leave(home.folder)
        (home.folder / "cgroup.subtree_control").write_text("+memory")
        cpuset = _hand_down(home.folder, "cpuset")
        engines.mkdir(exist_ok=True)
        sweep(engines)
        limit = _common(engines, memory_max_bytes)
        (engines / "memory.max").write_text("max" if limit is None else str(limit))
        cpuset = cpuset and _hand_down(engines, "cpuset")
        folder = engines / f"{name}.{next(_numbers)}.{_me()}"
        folder.mkdir()
    except OSError as error:
        return f"{error.filename or home.folder}: {error.strerror or error}"
    if cpuset and cpus is not None:
        try:
            (folder / "cpuset.cpus").write_text(ranges(cpus))
        except OSError:
            cpuset = False
    return Cgroup(folder, limit, cpuset and cpus is not None)


def sweep(engines: Path) -> None:
    """Remove groups whose maker is gone; the kernel refuses where something runs in one, detached as it may be."""
    for folder in sorted(engines.iterdir()):
        if folder.is_dir() and not _maker_lives(folder.name):
            with suppress(OSError):
                folder.rmdir()


def memory_limit_of(pid: int, proc: Path = _PROC) -> int | None:
    """The least memory.max of a process's group and those above it; None: no limit, or not to be seen."""
    mount = _mount(proc)
    path = _path(proc, str(pid))
    if mount is None or path is None:
        return None
    folder = mount / path.lstrip("/")
    limits = list[int]()
    while folder.is_relative_to(mount) and ".." not in folder.parts:
        said = _text(folder / "memory.max").strip()
        limits += [int(said)] if said.isdigit() else []
        if folder == mount:
            break
        folder = folder.parent
    return min(limits, default=None)


def in_cpuset_of_ours(pid: int, proc: Path = _PROC) -> bool:
    """Whether a process is in a group of ours that keeps it to some CPUs."""
    mount = _mount(proc)
    path = _path(proc, str(pid))
    if mount is None or path is None or Path(path).parent.name != ENGINES:
        return False
    return bool(_text(mount / path.lstrip("/") / "cpuset.cpus").strip())


def _is_ours(folder: Path, mount: Path, managed: Path) -> bool:
    if folder == mount:
        return not managed.exists()  # the root of the machine or of a container belongs to its service manager
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _room_in(home: Path) -> Home | str:
    if "memory" not in _words(home / "cgroup.controllers"):
        return f"the control group {home} was not given the memory controller"
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        if not os.access(home / name, os.W_OK):
            return f"{home / name} cannot be written"
    members = {int(word) for word in _words(home / "cgroup.procs") if word.isdigit()}
    root = not (home / "cgroup.type").exists()
    if not members or root:  # the machine's root alone may have members and groups below it
        return Home(home, crowded=False)
    others = members - {os.getpid(), *descendants(os.getpid())}
    if others:
        return f"{number_of(len(others), 'other process', 'other processes')} in the control group that was delegated"
    return Home(home, crowded=True)


def _leave(home: Path) -> None:
    leaf = home / COMMAND
    leaf.mkdir(exist_ok=True)
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(str(pid))


def _hand_down(folder: Path, controller: str) -> bool:
    if controller not in _words(folder / "cgroup.controllers"):
        return False
    try:
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError:
        return False
    return True


def _common(engines: Path, wanted: int | None) -> int | None:
    """The limit for all engines: the smaller one while others run, because each was promised to leave its reserve."""
    now = _text(engines / "memory.max").strip()
    others = any(folder.is_dir() for folder in engines.iterdir())
    limits = [wanted] if wanted is not None else []
    limits += [int(now)] if others and now.isdigit() else []
    return min(limits, default=None)


def _me() -> str:
    me = Pid.here(os.getpid())
    return f"{os.getpid()}.{me.ticks if me is not None else 0}"


def _maker_lives(name: str) -> bool:
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not all(part.isdigit() for part in parts[1:]):
        return True  # not a name of ours
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


_ASK_S = 30.0


def scope_words(name: str, memory_max_bytes: int, *, root: bool, program: str = "systemd-run") -> tuple[str, ...]:
    """What is written before a command to run it in a scope."""
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
    """The words that put a command into a scope, tried out on one that does nothing; or why there are none."""
    env = os.environ if env is None else env
    root = os.geteuid() == 0
    program = shutil.which("systemd-run", path=env.get("PATH"))
    if program is None:
        return "systemd-run is not installed"
    runtime = env.get("XDG_RUNTIME_DIR")
    if root and not (run / "systemd/system").is_dir():
        return "systemd does not run here"
    if not root and (not runtime or not (Path(runtime) / "systemd/private").exists()):
        return "no systemd of this user runs (loginctl enable-linger starts one)"
    words = scope_words(name, memory_max_bytes, root=root, program=program)
    try:
        tried = subprocess.run(
            [*words, "true"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd-run does not answer ({error})"
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines()
        return f"systemd-run failed: {said[-1]}" if said else f"systemd-run failed with {tried.returncode}"
    return words
