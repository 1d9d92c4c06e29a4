"""What `build` builds: llama.cpp of xllamacpp's source distribution, or ik_llama.cpp of a folder or git repository."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from tokenmill.errors import EngineError, UsageError
from tokenmill.native.builds import source
from tokenmill.native.builds.toolchain import OFF, ON, common_options
from tokenmill.native.llama import ik_llama
from tokenmill.native.llama.library import LLAMA_VERSION
from tokenmill.version import WHEEL, WHEEL_VERSION

BuildKind = Literal["llama.cpp", "ik_llama.cpp"]
_GIT_URL = re.compile(r"(https?|ssh|git|file)://\S+|[\w.-]+@[\w.-]+:\S+")
_IK_FOLDERS = ("cmake", "common", "ggml", "include", "src", "vendor", "licenses")
_IK_FILES = ("CMakeLists.txt", "LICENSE", "AUTHORS")
_GIT_LIMIT_S = 1800.0


class Recipe(Protocol):
    """A source, and how it is compiled."""

    kind: BuildKind
    version: str  # what the library says about itself
    max_sequences: int
    targets: tuple[str, ...]
    libraries: tuple[str, ...]  # patterns of the shared libraries in the build tree
    programs: tuple[str, ...]  # in the build tree's bin folder
    changes_sha256: str  # of the changes to the source

    def name(self, architectures: tuple[str, ...]) -> str:
        """The name of the finished build."""

    def write(self, target: Path) -> str:
        """Write the source to `target`; files that are there and equal are not touched. Returns its digest."""

    def options(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """cmake's definitions, as NAME=VALUE."""

    def digest(self) -> str:
        """The digest of the source."""


class LlamaCppRecipe:
    """llama.cpp of the pinned version, with the limit of sequences raised."""

    kind: BuildKind = "llama.cpp"
    version: str = LLAMA_VERSION
    targets: tuple[str, ...] = ("llama", "llama-server")
    libraries: tuple[str, ...] = ("bin/*.so*",)
    programs: tuple[str, ...] = ("llama-server",)

    def __init__(self, given: Callable[[], Path], max_sequences: int) -> None:
        """`given` returns the archive or folder; it may download it."""
        self._given = given
        self.max_sequences = max_sequences
        self.changes_sha256 = source.changes_digest(max_sequences)

    def name(self, architectures: tuple[str, ...]) -> str:
        """The name of the finished build."""
        return f"{self.kind}-{WHEEL_VERSION}-{_backend(architectures)}-{self.max_sequences}"

    def write(self, target: Path) -> str:
        """Write the changed source."""
        return source.write_source(self._given(), target, self.max_sequences)

    def options(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """cmake's definitions."""
        return (
            *(f"{name}=OFF" for name in OFF),
            *(f"{name}=ON" for name in ON),
            f"LLAMA_BUILD_NUMBER={WHEEL_VERSION.rpartition('.')[2]}",  # which cmake would take from a git repository
            f"LLAMA_BUILD_COMMIT={WHEEL}",
            *common_options(architectures),
        )

    def digest(self) -> str:
        """The digest of the source."""
        return source.digest(source.source_files(self._given()))


class IkLlamaRecipe:
    """ik_llama.cpp: the library alone. Without the flash-attention kernels for rare cache types, which take longest."""

    kind: BuildKind = "ik_llama.cpp"
    version: str = ik_llama.VERSION
    max_sequences: int = ik_llama.MAX_SEQUENCES
    targets: tuple[str, ...] = ("llama",)
    libraries: tuple[str, ...] = ("src/libllama.so", "ggml/src/libggml.so")
    programs: tuple[str, ...] = ()
    changes_sha256 = ""

    def __init__(self, folder: Path) -> None:
        header = folder / source.HEADER
        if not header.is_file() or not ik_llama.is_header(header.read_text(encoding="utf-8", errors="replace")):
            raise UsageError(
                f"{folder} does not contain ik_llama.cpp",
                hint="--source takes a checkout of ik_llama.cpp, or the URL of its git repository",
                code="source_not_ik_llama",
            )
        self._folder = folder
        self.commit = _git(folder, "rev-parse", "--short=12", "HEAD") or ""

    def name(self, architectures: tuple[str, ...]) -> str:
        """The name of the finished build."""
        return f"{self.kind}-{self.commit or self.digest()[:12]}-{_backend(architectures)}"

    def write(self, target: Path) -> str:
        """Copy the source files of the build."""
        total = hashlib.sha256()
        for name in self._files():
            data = (self._folder / name).read_bytes()
            total.update(f"{name}\0{len(data)}\0".encode())
            total.update(data)
            source.write_file(target / name, data)
        return total.hexdigest()

    def options(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """cmake's definitions."""
        return (
            "LLAMA_BUILD_TESTS=OFF",
            "LLAMA_BUILD_EXAMPLES=OFF",
            "LLAMA_BUILD_SERVER=OFF",
            "LLAMA_CURL=OFF",
            "BUILD_SHARED_LIBS=ON",
            "GGML_NATIVE=ON",
            "GGML_IQK_FA_ALL_QUANTS=OFF",
            "CMAKE_BUILD_RPATH=$ORIGIN",  # both libraries are moved to one folder
            *common_options(architectures),
        )

    def digest(self) -> str:
        """The digest of the source."""
        return source.digest((name, (self._folder / name).read_bytes()) for name in self._files())

    def _files(self) -> list[str]:
        folders = (path for name in _IK_FOLDERS for path in (self._folder / name).rglob("*") if path.is_file())
        files = (self._folder / name for name in _IK_FILES)
        return sorted(path.relative_to(self._folder).as_posix() for path in (*folders, *files) if path.is_file())


def ik_source(given: str, cache: Path, notify: Callable[[str], None]) -> Path:
    """The folder of ik_llama.cpp's source: `given` itself, or a clone of that git repository in `cache`."""
    if not _GIT_URL.fullmatch(given):
        return Path(given).expanduser()
    clone = cache / f"ik_llama.cpp-{hashlib.sha256(given.encode()).hexdigest()[:12]}"
    notify(f"cloning {given}")
    if (clone / ".git").is_dir():
        _run_git("-C", str(clone), "fetch", "--depth", "1", "origin", "HEAD")
        _run_git("-C", str(clone), "reset", "--hard", "FETCH_HEAD")
    else:
        shutil.rmtree(clone, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        _run_git("clone", "--depth", "1", "--", given, str(clone))
    return clone


def _run_git(*arguments: str) -> None:
    git = shutil.which("git")
    if git is None:
        raise EngineError("missing: git", hint="apt-get install git, or give a folder", code="build_tools_missing")
    done = subprocess.run(
        [git, *arguments], capture_output=True, text=True, errors="replace", timeout=_GIT_LIMIT_S, check=False
    )
    if done.returncode:
        raise EngineError(
            f"git {arguments[0]} failed with exit code {done.returncode}",
            hint=done.stderr.strip()[-1000:] or None,
            code="clone_failed",
        )


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it is missing, or the folder is no repository of its own."""
    if not (folder / ".git").exists() or (git := shutil.which("git")) is None:
        return None
    done = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _backend(architectures: tuple[str, ...]) -> str:
    return f"cuda{'-'.join(architectures)}" if architectures else "cpu"
