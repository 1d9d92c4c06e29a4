"""Samples the processes of a loading engine: /proc, GPU memory and the end of its log.

Works for any engine and its child processes. Values that cannot be read are None.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tokenmill.engine import logs
from tokenmill.engine.engine import EngineKind
from tokenmill.engine.loading.diagnosis import diagnose, facts
from tokenmill.engine.loading.process import (
    maps_any,
    parse_io,
    parse_major_faults,
    parse_status,
)
from tokenmill.engine.loading.progress import LoadProgress, LoadWork, Sample, points, progress, since_growth
from tokenmill.engine.loading.system import System, read_system
from tokenmill.engine.logs.parsed import Hint
from tokenmill.engine.process.identity import descendants
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.launch.parse.parsed import Finding
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB

LOG_BYTES = MIB  # maximum that is read from the end of the log per sample
MAX_SAMPLES = 7200


class LoadWatch:
    """Watches one load. `sample` takes a sample; nothing else reads the system."""

    def __init__(
        self,
        pid: int,
        files: Sequence[Path],
        *,
        log: Path | None = None,
        kind: EngineKind = "llama-server",
        copied_bytes: int = 0,
        host: Host | None = None,
        tree: Callable[[int], tuple[int, ...]] = descendants,
        vram: Callable[[tuple[int, ...]], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a process that loads these files, or folders with safetensors files.

        copied_bytes: bytes that the plan copies out of mapped files.
        vram: returns the GPU memory of processes.
        """
        self.pid = pid
        self.work = LoadWork(size_of(files), copied_bytes)
        self.samples: list[Sample] = []
        self.systems: list[System] = []
        self._model = next(_weights(files), None)
        self._files = frozenset(_identities(files))
        self._host: Host = host or LocalHost()
        self._tree = tree
        self._vram = vram
        self._clock = clock
        self._log = Tail(log, kind) if log is not None else None

    def sample(self) -> LoadProgress:
        """Take a sample and return the load progress."""
        self.samples.append(self._measure())
        if self._model is not None:
            self.systems.append(read_system(self._host, self.samples[-1].time_s, pid=self.pid, model=self._model))
        for snapshots in (self.samples, self.systems):
            if len(snapshots) > MAX_SAMPLES:  # keep the first ones, which are the baseline
                del snapshots[MAX_SAMPLES // 4 : MAX_SAMPLES // 2]
        return progress(self.samples, self.work)

    def findings(self, plan: Plan, *, warm: bool = False) -> tuple[Finding, ...]:
        """Diagnose the load from the samples so far; `warm`: the file was cached before."""
        if not self.systems:
            return ()
        now = progress(self.samples, self.work)
        idle_s = since_growth(list(points(self.samples, self.work)))
        return diagnose(facts(plan, self.systems, self.samples, now, idle_s=idle_s, warm=warm))

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine's current processes."""
        return (self.pid, *self._tree(self.pid))

    def _measure(self) -> Sample:
        text = self._host.text
        file_bytes: list[int] = []
        anon: list[int] = []
        read: list[int] = []
        disk: list[int] = []
        faults: list[int] = []
        mapped: bool | None = None
        pids = self.pids
        for pid in pids:
            memory = parse_status(text(f"/proc/{pid}/status") or "")
            reads = parse_io(text(f"/proc/{pid}/io") or "")
            major = parse_major_faults(text(f"/proc/{pid}/stat") or "")
            maps = text(f"/proc/{pid}/maps")
            for found, value in (
                (file_bytes, memory.file_bytes),
                (anon, memory.anon_bytes),
                (read, reads.chars),
                (disk, reads.disk_bytes),
                (faults, major),
            ):
                if value is not None:
                    found.append(value)
            if maps is not None:
                mapped = bool(mapped) or maps_any(maps, self._files)
        return Sample(
            time_s=self._clock(),
            # With several workers, each maps and reads the whole model.
            file_bytes=max(file_bytes, default=None),
            mapped=mapped,
            anon_bytes=sum(anon) if anon else None,
            read_bytes=max(read, default=None),
            disk_bytes=sum(disk) if disk else None,
            vram_bytes=self._vram(pids) if self._vram else None,
            major_faults=sum(faults) if faults else None,
            hint=self._log.hint() if self._log else None,
        )


def copied_bytes(plan: Plan, *, vram: bool = False) -> int:
    """Bytes that a load copies out of mapped files; to GPUs only if `vram` (their memory) is measured."""
    if not plan.settings.mmap or plan.settings.engine == "vllm":
        return 0
    rows = plan.ledger.after_load
    to_gpus = sum(row.bytes for row in rows if row.item == "weights" and row.tier.startswith("gpu")) if vram else 0
    return to_gpus + sum(row.bytes for row in rows if row.item == "repack")


class Tail:
    """Reads a growing log once; starts again if the log is truncated or replaced."""

    def __init__(self, path: Path, kind: EngineKind) -> None:
        """Read from the log's start."""
        self._path = path
        self._kind = kind
        self._offset = 0
        self._inode = 0
        self._rest = b""
        self._last: Hint | None = None

    def hint(self) -> Hint | None:
        """Return the latest progress in the log, including its unfinished last line."""
        new = self._new()
        text = (self._rest + new).decode(errors="replace")
        for line in logs.lines(text):
            found = logs.hint(self._kind, line)
            if found is not None and not (self._last is not None and self._last.phase == "ready"):
                self._last = found
        self._rest = (self._rest + new).rpartition(b"\n")[2][-LOG_BYTES:]
        return self._last

    def _new(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                inode = self._path.stat().st_ino
                if size < self._offset or inode != self._inode:  # keeps the hint from the old file
                    self._offset = 0
                    self._inode = inode
                    self._rest = b""
                file.seek(max(self._offset, size - LOG_BYTES))
                self._offset = size
                return file.read(LOG_BYTES)
        except OSError:
            return b""


def size_of(files: Sequence[Path]) -> int | None:
    """Total size of the files, and of the weights in folders; None if one cannot be read."""
    try:
        return sum(file.stat().st_size for file in _weights(files)) or None
    except OSError:
        return None


def _weights(files: Sequence[Path]) -> Iterator[Path]:
    for path in files:
        yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _identities(files: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """Name and inode of each file, with links resolved."""
    for file in _weights(files):
        with suppress(OSError):
            yield file.resolve().name, file.stat().st_ino
