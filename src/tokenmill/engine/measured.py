"""What plans predicted and machines then took, kept for the forecast's calibration: one line of JSON for each load.

`<state>/measured/loads.jsonl` only grows, by whole lines under a lock, until it is too long; then its older half is
dropped. A line that cannot be read (a crash in the middle of a write, another version's) is passed over. Holds sizes,
settings and names of machine and model; no prompts, no paths.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.decode import decode
from tokenmill.engine.reconcile import Reconciliation, Row
from tokenmill.errors import ConfigError, EngineError
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB

MOST_BYTES = 8 * MIB
_FOLDER = "measured"
_FILE = "loads.jsonl"
_LOCK = "lock"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """One load."""

    when: str  # ISO 8601, UTC
    machine: str  # name
    machine_id: str
    model: str
    model_id: str
    build: str | None
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    load_s: float | None = None  # measured, start to ready
    load_cold_s: float | None = None  # predicted
    load_warm_s: float | None = None
    types: dict[str, int] = field(default_factory=dict)  # bytes of the weights by tensor type


def record(
    plan: Plan, found: Reconciliation, *, model_id: str, load_s: float | None = None, when: datetime | None = None
) -> Record:
    """What to keep of a load."""
    moment = (when or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    return Record(
        moment,
        plan.machine.name,
        machine_id(plan.machine),
        plan.profile.name,
        model_id,
        found.build,
        asdict(plan.settings),
        found.rows,
        load_s,
        plan.forecast.load_cold_s,
        plan.forecast.load_warm_s,
        types_of(plan.profile),
    )


def types_of(profile: Profile) -> dict[str, int]:
    """Bytes of a model's weights by tensor type."""
    sizes: Counter[str] = Counter()
    for tensor in profile.tensors:
        sizes[tensor.type] += tensor.bytes
    return dict(sizes)


def machine_id(machine: Machine) -> str:
    """The same for the same processors, memory and cards, whatever the machine is called today."""
    gpus = sorted((gpu.name, gpu.vram_bytes) for gpu in machine.gpus)
    parts = (
        machine.cpu.model,
        machine.cpu.sockets,
        machine.cpu.cores,
        machine.dram.total_bytes,
        machine.dram.mts,
        machine.pmem.total_bytes if machine.pmem else None,
        gpus,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def append(state: Path, kept: Record, *, most_bytes: int = MOST_BYTES) -> None:
    """Add a record, whole or not at all; other processes may do the same at once."""
    append_line(state / _FOLDER / _FILE, asdict(kept), most_bytes=most_bytes)


def append_line(path: Path, kept: dict[str, Any], *, most_bytes: int = MOST_BYTES) -> None:
    """The same for any file of JSON lines."""
    line = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / _LOCK):
            if path.exists() and path.stat().st_size + len(line) > most_bytes:
                _halve(path, most_bytes // 2)
            _add(path, line)
    except OSError as error:
        raise EngineError(
            f"cannot keep measurements in {folder}: {error.strerror}", hint="check state_dir and the room on its disk"
        ) from error


def read(state: Path) -> tuple[Record, ...]:
    """Every record that can be read, oldest first."""
    return tuple(read_lines(state / _FOLDER / _FILE, Record))


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Values of a file that `append_line` wrote, oldest first; none where it is not there."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for number, line in enumerate(text.split(b"\n"), 1):
        try:
            data = json.loads(line)
            if isinstance(data, dict):
                yield decode(kind, data, where=f"{path.name} line {number}")
        except (ValueError, ConfigError):
            continue


def _add(path: Path, line: bytes) -> None:
    """One write at the end; a line that a crash cut short is ended first, a write that fails is taken back."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        whole = b"\n" + line if torn else line
        try:
            if os.write(file, whole) != len(whole):
                raise OSError(28, "No space left on device")  # noqa: TRY301  told as the kernel tells it
        except OSError:
            os.ftruncate(file, size)
            raise
        os.fsync(file)
    finally:
        os.close(file)


def _halve(path: Path, keep_bytes: int) -> None:
    """Keep the newest whole lines; the file is replaced in one step."""
    kept = path.read_bytes()[-keep_bytes:].partition(b"\n")[2]
    replace_whole(path, kept)


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it finds the old one or the new one. OSError where it cannot be."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
