"""Finished builds of llama.cpp, and the one that the native engine uses.

    engines_dir/llama.cpp-2026.10.11549-cuda90-4096/
        build.json      what was built, from what and for which machine
        bin/            libllama.so and the libraries that it needs, llama-server
        llama.h

`with_build` is the only place that chooses: it puts the newest build that suits this machine into the configuration of
an engine, unless the configuration names a library of its own, or "wheel".
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata as packages
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.decode import decode
from tokenmill.errors import ConfigError, UsageError
from tokenmill.native.builds.recipe import BuildKind
from tokenmill.native.builds.toolchain import Processor, architectures_here, this_processor
from tokenmill.native.llama import ik_llama
from tokenmill.native.llama.library import LLAMA_VERSION, WHEEL_MAX_SEQUENCES, open_library
from tokenmill.planner.plan import Decision
from tokenmill.storage.atomic import replace_file
from tokenmill.version import WHEEL, WHEEL_VERSION

RECORD = "build.json"
FROM_WHEEL = "wheel"
"""The value of `engine.library` for the library inside the wheel, whatever has been built."""
FROM_IK = "ik"
"""The value of `engine.library` for the newest build of ik_llama.cpp, which is never used otherwise."""


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build, as its build.json describes it."""

    name: str
    xllamacpp: str  # version of the source distribution
    llama_version: str
    max_sequences: int
    cuda_architectures: tuple[str, ...]  # empty: without CUDA
    cpu: str | None  # model of the processor that it is compiled for
    cpu_isa: tuple[str, ...]
    source_sha256: str
    changes_sha256: str  # of the changes to it
    library_sha256: str
    options: tuple[str, ...]  # of cmake
    compiler: str
    nvcc: str | None
    cmake: str
    verified: bool  # False: there was no card to open it with
    built_at: str  # ISO 8601, UTC
    duration_s: float  # of the call that finished it
    bytes: int
    kind: BuildKind = "llama.cpp"
    folder: Path = Path()  # not in the file

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / "bin" / "libllama.so"

    @property
    def header(self) -> Path:
        """The header that it was built from."""
        return self.folder / "llama.h"

    @property
    def server(self) -> Path:
        """The server program, which builds of ik_llama.cpp do not have."""
        return self.folder / "bin" / "llama-server"

    @property
    def engine_build(self) -> str:
        """The build that a native engine on this library reports."""
        version = self.llama_version if self.kind == "ik_llama.cpp" else f"llama.cpp {self.llama_version}"
        return f"{version} ({self.library.name} {self.library_sha256[:12]})"

    @property
    def uses_cuda(self) -> bool:
        """Whether it is for NVIDIA cards."""
        return bool(self.cuda_architectures)

    def write(self) -> None:
        """Write build.json."""
        document = asdict(self)
        del document["folder"]
        replace_file(self.folder / RECORD, (json.dumps(document, indent=2) + "\n").encode())


@dataclass(frozen=True, slots=True)
class BuildMachine:
    """What decides whether a build suits a machine."""

    processor: Processor
    cuda_architectures: tuple[str, ...]
    gpu_wheel: bool  # the installed wheel is a variant for GPUs


def finished(engines: Path) -> tuple[Build, ...]:
    """All finished builds, newest first."""
    folders = (path.parent for path in engines.glob(f"*/{RECORD}") if not path.parent.name.startswith("."))
    builds = [build for build in map(read, folders) if build is not None]
    return tuple(sorted(builds, key=lambda build: build.built_at, reverse=True))


def read(folder: Path) -> Build | None:
    """The build in a folder; None if there is none, or it is damaged or from another version of tokenmill."""
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        build = replace(decode(Build, document, where=str(folder / RECORD)), folder=folder)
    except (OSError, ValueError, ConfigError):
        return None
    whole = build.library.is_file() and build.header.is_file()
    whole = whole and (build.kind == "ik_llama.cpp" or build.server.is_file())
    return build if whole else None


@cache
def this_host() -> BuildMachine:
    """The machine and the wheel of this process."""
    try:
        wheel = packages.version(WHEEL)
    except packages.PackageNotFoundError:
        wheel = ""
    return BuildMachine(this_processor(), architectures_here(), gpu_wheel="+" in wheel)


def unsuitable(build: Build, host: BuildMachine) -> str | None:
    """Why a build cannot be used on a machine, or None if it can."""
    if build.kind == "llama.cpp" and (build.xllamacpp != WHEEL_VERSION or build.llama_version != LLAMA_VERSION):
        return f"built from {WHEEL} {build.xllamacpp}; this tokenmill needs {WHEEL_VERSION}"
    if build.cpu != host.processor.model or not set(build.cpu_isa) <= set(host.processor.isa):
        return f"compiled for another processor: {build.cpu}"
    if missing := set(host.cuda_architectures) - set(build.cuda_architectures):
        made_for = f"for CUDA architecture {', '.join(build.cuda_architectures)}" if build.uses_cuda else "without CUDA"
        return f"built {made_for}, and there is a card of architecture {', '.join(sorted(missing))}"
    if build.uses_cuda and not host.cuda_architectures:
        return "built with CUDA, and there is no NVIDIA card"
    if host.gpu_wheel and not build.uses_cuda:
        return f"built without CUDA, and the installed {WHEEL} supports GPUs"
    return None


def chosen(engines: Path, kind: BuildKind = "llama.cpp") -> Build | None:
    """The newest build of a kind that suits this machine; None if there is none."""
    builds = [build for build in finished(engines) if build.kind == kind]
    return next((build for build in builds if unsuitable(build, this_host()) is None), None) if builds else None


def with_build(config: EngineConfig, engines: Path) -> EngineConfig:
    """The configuration with the library, or the llama-server, of the build that suits this machine.

    Unchanged where it names a library, program or container itself, and for other kinds of engines. UsageError if it
    asks for ik_llama.cpp, which has not been built.
    """
    if config.library == FROM_WHEEL:
        return replace(config, library=None, header=None)
    if config.kind == "native" and config.library == FROM_IK:
        build = chosen(engines, "ik_llama.cpp")
        if build is None:
            raise UsageError(
                'engine.library is "ik", and there is no build of ik_llama.cpp for this machine',
                hint="tokenmill engines build --ik --source FOLDER",
                code="build_missing",
            )
        return replace(config, library=str(build.library), header=str(build.header))
    if config.kind == "native" and config.library is None:
        build = chosen(engines)
        return config if build is None else replace(config, library=str(build.library), header=str(build.header))
    if config.kind == "llama-server" and config.library is None and config.binary is None and config.container is None:
        build = chosen(engines)
        return config if build is None else replace(config, binary=str(build.server))
    return config


def build_of(config: EngineConfig) -> Build | None:
    """The finished build whose library or server a configuration names."""
    used = config.library if config.kind == "native" else config.binary
    return None if used is None else read(Path(used).expanduser().parent.parent)


def uses_ik(config: EngineConfig) -> bool:
    """Whether a native engine with this configuration runs on ik_llama.cpp."""
    if config.kind != "native" or config.header is None:
        return False
    try:
        text = Path(config.header).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:  # opening the library reports it
        return False
    return ik_llama.is_header(text)


def library_decisions(config: EngineConfig, engines: Path) -> tuple[Decision, ...]:
    """The decision for a build, or against all that there are; none without builds or with a library of the user's."""
    if build := build_of(config):
        newest = f"newest build for this machine, up to {build.max_sequences} sequences"
        why = f"{newest}; engine.library chooses another"
        return (Decision("library", build.name, why),) if build.folder.parent == engines else ()
    if config.kind not in ("native", "llama-server") or config.library or config.binary or config.container:
        return ()
    notes = [(build, unsuitable(build, this_host())) for build in finished(engines) if build.kind == "llama.cpp"]
    return tuple(
        Decision("library", f"{WHEEL} {WHEEL_VERSION}", f"{build.name} is not used: {note}")
        for build, note in notes
        if note
    )[:1]


def max_sequences(config: EngineConfig) -> int:
    """The sequences that the library of a native engine allows, found without opening it where that is possible."""
    if config.library is None or config.library == FROM_WHEEL:
        return WHEEL_MAX_SEQUENCES
    if build := build_of(config):
        return build.max_sequences
    header = None if config.header is None else Path(config.header).expanduser()
    return open_library(Path(config.library).expanduser(), header=header).max_sequences


def remove(engines: Path, name: str) -> Build:
    """Remove a finished build; UsageError if there is none of that name."""
    builds = {build.name: build for build in finished(engines)}
    if name not in builds:
        raise UsageError(f"no build named {name}", hint=f"builds: {', '.join(builds) or 'none'}")
    removed = builds[name].folder.rename(engines / f".removed-{name}")
    shutil.rmtree(removed)
    return builds[name]
