"""A memory limit through systemd, where a manager runs that makes scopes for us: the user's own, or root's.

A scope is a control group that systemd makes for processes which somebody else starts: `systemd-run --scope` asks for
one around itself and then becomes the program, with the same number, so that whoever watches it notices nothing.
systemd removes the scope when its last process is gone, however that came about.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tokenmill.units import MIB

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
