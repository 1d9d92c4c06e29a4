"""Builds llama.cpp for the validation, with the code of `tokenmill engines build`.

`pack` writes the result in parts that can be copied elsewhere, `unpack` restores them: a build takes minutes on 16
cores.

    python bench/gpu/prove_build.py SDIST OUT.tar.gz      archive the part of the source that a build needs: 5 of 38 MB
"""

import io
import shutil
import signal
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from prove_rows import Clock

from tokenmill.errors import TokenmillError
from tokenmill.native.builds.build import BuildOptions, build
from tokenmill.native.builds.source import source_files
from tokenmill.units import MIB

PART_BYTES = 15 * MIB
PACKED = "built.tar.gz"


@dataclass(frozen=True, slots=True)
class Built:
    """The library and the server to run on."""

    library: Path | None  # None: the wheel's own
    header: Path | None
    server: Path


def found(folder: Path) -> Built | None:
    """Whether a build is complete."""
    library = folder / "bin" / "libllama.so"
    header = folder / "llama.h"
    server = folder / "bin" / "llama-server"
    return Built(library, header, server) if all(path.exists() for path in (library, header, server)) else None


def slim(given: Path, target: Path) -> int:
    """Write the required part of the source as an archive; returns its bytes."""
    with tarfile.open(target, "w:gz", compresslevel=9) as tar:
        for name, data in source_files(given):
            member = tarfile.TarInfo(f"llama.cpp/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target.stat().st_size


def make(source: Path, state: Path, clock: Clock, *, cuda: bool) -> tuple[Built, float, tuple[str, ...]]:
    """Build into `state`/build within the time; returns the build, its seconds and its GPU architectures.

    After a timeout, the same call continues.
    """

    def expired(_number: int, _frame: object) -> None:
        raise TokenmillError("the build was not finished in time", hint="run it again: it continues")

    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, clock.left_s))
    try:
        finished = build(BuildOptions(state / "builds", state / "cache", source, cuda=cuda)).build
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    folder = state / "build"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished.folder, folder, symlinks=True)
    made = found(folder)
    if made is None:
        raise TokenmillError(f"the build in {folder} has no library or server", hint=f"see {finished.folder}")
    return made, finished.duration_s, finished.cuda_architectures


def pack(folder: Path, target: Path) -> int:
    """Write the library, its dependencies, llama-server and llama.h compressed and in parts; returns their number."""
    target.mkdir(parents=True, exist_ok=True)
    names = [*sorted((folder / "bin").glob("*.so*")), folder / "bin" / "llama-server", folder / "llama.h"]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=6) as tar:
        for path in names:
            tar.add(path, arcname=str(path.relative_to(folder)))
    data = whole.getvalue()
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    for number, part in enumerate(parts):
        (target / f"{PACKED}.{number:02}").write_bytes(part)
    return len(parts)


def unpack(parts: Path, folder: Path) -> Built | None:
    """A build that `pack` wrote; None if there is none."""
    names = sorted(parts.glob(f"{PACKED}.*"))
    if not names:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in names)), mode="r:gz") as tar:
        tar.extractall(folder, filter="data")
    return found(folder)


if __name__ == "__main__":
    print(f"{slim(Path(sys.argv[1]), Path(sys.argv[2])) / MIB:.1f} MiB")
