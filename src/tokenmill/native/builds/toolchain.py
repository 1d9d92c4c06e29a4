"""What a build needs: cmake, ninja, compilers, memory and disk, and the cards that it is made for."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import EngineError, NoSpace, UsageError
from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost
from tokenmill.units import GIB, format_bytes

MIN_CMAKE = (3, 18)
_LIMIT_S = 60.0  # nvidia-smi takes seconds where the driver is not loaded
_APT = "apt-get install cmake ninja-build g++"
_CUDA_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
_DISK_BYTES = {"cpu": GIB, "cuda": 4 * GIB}
_JOB_BYTES = {"cpu": GIB, "cuda": 2 * GIB}  # memory of one compiler
OFF = (
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "GGML_CUDA_NCCL",
)
ON = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_COMMON", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER", "GGML_NATIVE")


@dataclass(frozen=True, slots=True)
class BuildTool:
    """A program and its version."""

    path: Path
    version: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The programs of a build."""

    cmake: BuildTool
    ninja: BuildTool
    compiler: BuildTool
    nvcc: BuildTool | None


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that a build is compiled for, with the instruction sets that llama.cpp uses."""

    model: str | None
    isa: tuple[str, ...]


def this_processor() -> Processor:
    """The processor of this machine."""
    cpu, _, _ = read_cpu(LocalHost())
    return Processor(cpu.model, cpu.isa)


def architectures_here() -> tuple[str, ...]:
    """The CUDA architectures of this machine's NVIDIA cards: 90 for compute capability 9.0; () without a card."""
    try:
        capabilities = [card.compute_capability or "" for card in LocalHost().nvml().cards]
    except ImportError:
        capabilities = []
    if not any(capabilities):
        capabilities = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    found = {match[1] + match[2] for text in capabilities if (match := re.fullmatch(r"(\d+)\.(\d+)", text.strip()))}
    return tuple(sorted(found, key=int))


def choose_architectures(*, cuda: bool | None, given: Iterable[str] = ()) -> tuple[str, ...]:
    """The CUDA architectures to build for; () for a build without CUDA.

    `cuda`: as requested, or None for CUDA if there is a card. UsageError for a request that cannot be met.
    """
    wanted = tuple(sorted({word for text in given for word in text.replace(";", ",").split(",") if word}))
    for word in wanted:
        if not re.fullmatch(r"\d{2,3}[a-z]?", word):
            raise UsageError(
                f"CUDA architecture {word!r} is not a number such as 90",
                hint="use the compute capability without its dot: 86 for 8.6, 90 for 9.0",
            )
    if cuda is False:
        if wanted:
            raise UsageError("--cpu and --cuda-architecture are mutually exclusive", hint="leave out one of them")
        return ()
    if wanted:
        return wanted
    here = architectures_here()
    if cuda and not here:
        raise UsageError(
            "no NVIDIA card answers on this machine, so its architecture is unknown",
            hint="give the target's, such as --cuda-architecture 90; or build without CUDA: --cpu",
        )
    return here


def find_toolchain(*, cuda: bool, asked: bool) -> Toolchain:
    """Find every program, or raise an EngineError that lists those that are missing.

    `asked`: CUDA was requested, and not chosen because there is a card.
    """
    cmake = _tool("cmake")
    ninja = _tool("ninja")
    compiler = _compiler()
    nvcc = _nvcc() if cuda else None
    missing = []
    if cmake is None:
        missing.append("cmake")
    elif _numbers(cmake.version) < MIN_CMAKE:
        missing.append(f"cmake {'.'.join(map(str, MIN_CMAKE))} or newer ({cmake.path} is {cmake.version})")
    missing += ["ninja"] if ninja is None else []
    missing += ["a C++ compiler"] if compiler is None else []
    hints = [f"{_APT} (cmake and ninja are on the package index, too)"] if missing else []
    if cuda and nvcc is None:
        missing.append("nvcc, CUDA's compiler")
        hints.append("install the CUDA toolkit, or set CUDACXX to its nvcc")
        if not asked:
            hints.append("this machine has an NVIDIA card; `--cpu` builds without it")
    if missing or cmake is None or ninja is None or compiler is None:
        raise EngineError(f"missing: {', '.join(missing)}", hint="; ".join(hints), code="build_tools_missing")
    return Toolchain(cmake, ninja, compiler, nvcc)


def check_disk(folder: Path, *, cuda: bool) -> None:
    """Raise NoSpace if the build would not fit the disk of `folder`."""
    needed_bytes = _DISK_BYTES["cuda" if cuda else "cpu"]
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise NoSpace(
            f"a build needs {format_bytes(needed_bytes)} in {folder}, where {format_bytes(free_bytes)} are free",
            hint="free some space, or set engines_dir in tokenmill.toml to another disk",
        )


def default_jobs(*, cuda: bool) -> int:
    """Compilers to run concurrently: one for each usable core that has memory for it."""
    cores = len(os.sched_getaffinity(0))
    match = re.search(r"MemAvailable:\s+(\d+) kB", LocalHost().text("/proc/meminfo") or "")
    memory = cores if match is None else int(match[1]) * 1024 // _JOB_BYTES["cuda" if cuda else "cpu"]
    return max(1, min(cores, memory))


def common_options(architectures: tuple[str, ...]) -> tuple[str, ...]:
    """cmake's definitions that every build has, as NAME=VALUE."""
    cuda = [f"CMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}"] if architectures else []
    return (
        "CMAKE_BUILD_TYPE=Release",
        "CMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the libraries find each other wherever the folder is moved
        f"GGML_CUDA={'ON' if architectures else 'OFF'}",
        *cuda,
    )


def configuration(source: Path, tree: Path, tools: Toolchain, options: Iterable[str]) -> list[str]:
    """The cmake command that configures a build."""
    words = [str(tools.cmake.path), "-S", str(source), "-B", str(tree), "-G", "Ninja"]
    words += [f"-DCMAKE_MAKE_PROGRAM={tools.ninja.path}", f"-DCMAKE_CXX_COMPILER={tools.compiler.path}"]
    if tools.nvcc is not None:
        words.append(f"-DCMAKE_CUDA_COMPILER={tools.nvcc.path}")
    return [*words, *(f"-D{option}" for option in options)]


def _tool(name: str) -> BuildTool | None:
    """A program on PATH or in the folder of the running Python, where pip installs cmake and ninja."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return None if found is None else BuildTool(Path(found), _version(found))


def _compiler() -> BuildTool | None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return None if found is None else BuildTool(Path(found), _version(found))


def _nvcc() -> BuildTool | None:
    given = [os.environ.get("CUDACXX", ""), "nvcc"]
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), *_CUDA_FOLDERS]
    names = [*given, *(f"{folder}/bin/nvcc" for folder in folders if folder)]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return None if found is None else BuildTool(Path(found), _version(found))


def _version(program: str) -> str:
    """The line of `--version` that names the release, as nvcc prints, else the first with a number in it."""
    lines = [line.strip() for line in _output(program, "--version").splitlines() if re.search(r"\d", line)]
    release = next((line for line in lines if "release" in line), None)
    return release or (lines[0] if lines else "unknown")


def _output(*command: str) -> str:
    """What a command prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
