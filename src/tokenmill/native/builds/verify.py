"""Opens a finished library in a process of its own: `python -m tokenmill.native.builds.verify LIBRARY HEADER`."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import EngineError, TokenmillError
from tokenmill.native.llama.library import LLAMA_VERSION, open_running

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class OpenedLibrary:
    """What a library says about itself."""

    version: str
    max_sequences: int
    devices: tuple[str, ...]


def verify(library: Path, header: Path, *, max_sequences: int, version: str = LLAMA_VERSION) -> OpenedLibrary:
    """Open a library in a child process; EngineError unless it has this version and limit."""
    command = [sys.executable, "-m", "tokenmill.native.builds.verify", str(library), str(header)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{library} could not be opened in {_LIMIT_S:.0f} s", code="build_failed") from error
    except json.JSONDecodeError as error:
        raise EngineError(
            f"{library} cannot be opened (exit {done.returncode})", hint=done.stderr[-2000:], code="build_failed"
        ) from error
    if "error" in answer:
        raise EngineError(answer["error"], hint=answer["hint"], code="build_failed")
    opened = OpenedLibrary(answer["version"], answer["max_sequences"], tuple(answer["devices"]))
    if (opened.version, opened.max_sequences) != (version, max_sequences):
        raise EngineError(
            f"{library} is {opened.version} with {opened.max_sequences} sequences, not {version} with {max_sequences}",
            code="build_failed",
        )
    return opened


def main() -> None:
    """Print what the library given on the command line says about itself, as JSON."""
    path, header = (Path(word) for word in sys.argv[1:])
    answer: dict[str, object]
    try:
        library = open_running(path, header=header)
        answer = {
            "version": library.version,
            "max_sequences": library.max_sequences,
            "devices": list(library.devices()),
        }
    except TokenmillError as error:
        answer = {"error": error.message, "hint": error.hint}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
