"""Builds llama.cpp's library and llama-server from the source in xllamacpp's source distribution.

CUDA for the architecture of the card that is there, nothing else. ninja goes on where it was stopped. `pack` writes the
result in parts of a size that can be carried elsewhere, `unpack` puts them back: a build takes minutes of 16 cores.

    python bench/gpu/prove_build.py SDIST OUT.tar.gz      what of the source such a build needs: 5 MB instead of 38
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from prove_rows import Clock

from tokenmill.errors import TokenmillError
from tokenmill.units import MIB

PART_BYTES = 15 * MIB
PACKED = "built.tar.gz"
TARGETS = ("llama", "llama-server")
OFF = (
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "GGML_CUDA_NCCL",
)
ON = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_COMMON", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER")
KEPT = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "licenses", "scripts", "src", "vendor")
CUDA_BIN = Path("/usr/local/cuda/bin")
# Found beside the binary, so that a build that was carried elsewhere needs no LD_LIBRARY_PATH.
ORIGIN = ("-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",)


@dataclass(frozen=True, slots=True)
class Built:
    """What a proof runs on."""

    library: Path | None  # None: the wheel's own
    header: Path | None
    server: Path


def found(folder: Path) -> Built | None:
    """A build that is whole."""
    library = folder / "bin" / "libllama.so"
    header = folder / "llama.h"
    server = folder / "bin" / "llama-server"
    return Built(library, header, server) if all(path.exists() for path in (library, header, server)) else None


def source_in(given: Path, into: Path) -> Path:
    """llama.cpp's folder: the one given, the one inside it, or that of an archive, which is unpacked."""
    if given.is_file():
        given = _unpacked(given, into)
    for path in (given, given / "llama.cpp", *sorted(given.glob("**/thirdparty/llama.cpp"))):
        if (path / "CMakeLists.txt").is_file() and (path / "include" / "llama.h").is_file():
            return path
    raise TokenmillError(f"{given} holds no llama.cpp", hint="--source: xllamacpp's source distribution, or its folder")


def _unpacked(archive: Path, into: Path) -> Path:
    mark = into / ".whole"
    if not mark.exists():
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
        mark.touch()
    return into


def is_needed(name: str) -> bool:
    """Whether a file of llama.cpp's folder is part of such a build."""
    first, *rest = name.split("/")
    if first == "ggml" and len(rest) > 1 and rest[0] == "src" and rest[1].startswith("ggml-") and len(rest) > 2:
        return rest[1] in ("ggml-cpu", "ggml-cuda", "ggml-blas")
    if first == "tools" and rest and rest[0] == "ui":
        return rest[1:] in (["CMakeLists.txt"], ["ui.cpp.in"], ["ui.h.in"], ["sources.cmake"])
    if first == "tools":
        return "tests" not in rest and not name.endswith((".jpeg", ".mp3", ".mp4"))
    return first in KEPT


def slim(given: Path, target: Path) -> int:
    """The part of the source that is needed, as an archive; its bytes."""
    with TemporaryDirectory() as folder:
        source = source_in(given, Path(folder) / "whole")
        with tarfile.open(target, "w:gz", compresslevel=9) as tar:
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                name = path.relative_to(source).as_posix()
                if is_needed(name):
                    tar.add(path, arcname=f"llama.cpp/{name}")
    return target.stat().st_size


def architecture() -> str | None:
    """The card's compute capability as nvcc names it: 90 of 9.0; None: there is no card."""
    try:
        asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    return f"{match[1]}{match[2]}" if match else None


def configuration(source: Path, folder: Path, cuda: str | None) -> list[str]:
    """The cmake command."""
    words = ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *ORIGIN]
    words += [f"-D{name}=OFF" for name in OFF] + [f"-D{name}=ON" for name in ON]
    if cuda is not None:
        words += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={cuda}"]
    return words


def build(source: Path, folder: Path, clock: Clock, *, cuda: str | None, log: Path) -> tuple[Built, float]:
    """Configure and compile, as far as the clock allows; the seconds it took this time."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PATH": f"{CUDA_BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    if not (folder / "build.ninja").exists():
        _run(configuration(source, folder, cuda), clock, env, log)
    _run(["ninja", "-C", str(folder), *TARGETS], clock, env, log)
    shutil.copy2(source / "include" / "llama.h", folder / "llama.h")
    done = found(folder)
    if done is None:
        raise TokenmillError(f"the build in {folder} has no library or server", hint=f"see {log}")
    return done, time.monotonic() - began


def _run(argv: Sequence[str], clock: Clock, env: dict[str, str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        try:
            code = subprocess.run(argv, stdout=out, stderr=out, env=env, timeout=clock.left_s, check=False).returncode
        except subprocess.TimeoutExpired:
            raise TokenmillError("the build did not end in its time", hint="run it again: it goes on") from None
        except OSError as error:
            raise TokenmillError(f"{argv[0]} cannot be run: {error.strerror}", hint="cmake, ninja, nvcc") from error
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        raise TokenmillError(f"{argv[0]} ended with {code}", hint="\n".join(tail))


def pack(folder: Path, target: Path) -> int:
    """The library, what it links to, llama-server and llama.h, compressed, in parts; how many."""
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
    """A build that `pack` wrote; None: there is none."""
    names = sorted(parts.glob(f"{PACKED}.*"))
    if not names:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in names)), mode="r:gz") as tar:
        tar.extractall(folder, filter="data")
    return found(folder)


if __name__ == "__main__":
    print(f"{slim(Path(sys.argv[1]), Path(sys.argv[2])) / MIB:.1f} MiB")
