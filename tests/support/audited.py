"""Runs a command in a separate process and reports the processes, modules and files that it used."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.run_cli import LIMIT_S, USUAL_HOME, environment

_AUDITED = """
import json, re, sys
from pathlib import Path

programs = []
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system"}

def hook(event, arguments):
    if event in STARTS:
        programs.append(str(arguments[0] if arguments else event))

sys.addaudithook(hook)
from tokenmill.cli import run
code = run(sys.argv[2:])
proc = Path("/proc/self")
mapped = {line.split()[-1] for line in (proc / "maps").read_text().splitlines() if line.count(" ") > 5}
seen = {
    "code": code,
    "programs": programs,
    "mapped": sorted(mapped),
    "read_bytes": int(re.search(r"rchar: (\\d+)", (proc / "io").read_text())[1]),
    "peak_bytes": 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", (proc / "status").read_text())[1]),
}
Path(sys.argv[1]).write_text(json.dumps(seen))
"""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a command printed and did."""

    stdout: str
    stderr: str
    code: int
    programs: list[str]  # that it started, in order
    mapped: list[str]  # files in its memory at the end: libraries, memory-mapped models
    read_bytes: int  # by read(2), including the program itself
    peak_bytes: int  # of memory

    @property
    def loaded(self) -> list[str]:
        """Mapped files of llama.cpp, and mapped models."""
        return [path for path in self.mapped if "llama" in Path(path).name.lower() or path.endswith(".gguf")]


def audited(seen: Path, *words: object) -> Audit:
    """Run a command to its end; `seen` is a file for the report."""
    command = [sys.executable, "-c", _AUDITED, str(seen), *map(str, words)]
    done = subprocess.run(
        command, env=environment(USUAL_HOME), capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    return Audit(stdout=done.stdout, stderr=done.stderr, **json.loads(seen.read_text()))
