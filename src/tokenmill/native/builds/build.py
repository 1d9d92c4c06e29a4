"""Builds llama.cpp's or ik_llama.cpp's library: `build` runs every step and returns the finished build.

    source -> .building-NAME/source   changed copy, kept until the build is finished
    cmake  -> .building-NAME/tree     ninja continues here after an interruption
    bin, llama.h, build.json -> .building-NAME/result, verified -> NAME

A finished build appears under its name all at once. One build runs at a time in a folder.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tokenmill.errors import EngineError, NoSpace, TokenmillError, UsageError
from tokenmill.native.builds import finished, source
from tokenmill.native.builds.finished import Build
from tokenmill.native.builds.recipe import IkLlamaRecipe, LlamaCppRecipe, Recipe, ik_source
from tokenmill.native.builds.toolchain import (
    Toolchain,
    check_disk,
    choose_architectures,
    configuration,
    default_jobs,
    find_toolchain,
    this_processor,
)
from tokenmill.native.builds.verify import verify
from tokenmill.storage.atomic import sync_folder
from tokenmill.version import WHEEL_VERSION

DEFAULT_SEQUENCES = 4096
_LOG_LINES = 25
_STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build, and where."""

    engines: Path  # folder of finished builds
    cache: Path  # folder of the downloaded source
    source: Path | str | None = None  # an archive or a folder instead; for ik_llama.cpp, a folder or a git repository
    ik: bool = False  # ik_llama.cpp instead of llama.cpp
    cuda: bool | None = None  # None: if there is a card
    cuda_architectures: tuple[str, ...] = ()  # default: those of the cards
    max_sequences: int = DEFAULT_SEQUENCES
    jobs: int | None = None
    force: bool = False  # also if an identical build is finished
    keep_build_tree: bool = False

    def __post_init__(self) -> None:
        if not source.MIN_SEQUENCES <= self.max_sequences <= source.MAX_SEQUENCES:
            raise UsageError(
                f"--max-sequences must be {source.MIN_SEQUENCES}-{source.MAX_SEQUENCES} (got {self.max_sequences})"
            )
        if self.ik and self.source is None:
            raise UsageError(
                "ik_llama.cpp is not in a package index, so its source must be given",
                hint="--source FOLDER with a checkout of it, or --source URL of its git repository",
                code="source_missing",
            )
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs must be at least 1 (got {self.jobs})")


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """A step of a build."""

    phase: Literal["download", "source", "configure", "compile", "verify"]
    done: int = 0  # bytes of a download, commands of a compilation
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A finished build, and whether this call made it."""

    build: Build
    was_there: bool
    log: Path | None = None  # None: nothing was run


OnBuildProgress = Callable[[BuildProgress], None]


def build(options: BuildOptions, on_progress: OnBuildProgress = lambda _: None) -> BuildResult:
    """Build llama.cpp, or find an identical finished build.

    Raises EngineError with the code `build_tools_missing`, `build_in_progress` or `build_failed`, NoSpace before a
    build that would fill the disk, and UsageError for options that contradict each other. Called again with the same
    options after an interruption or a failure, it continues where it stopped.
    """
    architectures = choose_architectures(cuda=options.cuda, given=options.cuda_architectures)
    recipe = _recipe(options, on_progress)
    if not options.force and (found := _identical(options, recipe, architectures)):
        return BuildResult(found, was_there=True)
    asked = options.cuda is not None or bool(options.cuda_architectures)
    tools = find_toolchain(cuda=bool(architectures), asked=asked)
    with _folder_errors(options.engines), _lock(options.engines):
        return _Builder(options, recipe, architectures, tools, on_progress).run()


class _Builder:
    """One build that holds the lock."""

    def __init__(
        self,
        options: BuildOptions,
        recipe: Recipe,
        architectures: tuple[str, ...],
        tools: Toolchain,
        on_progress: OnBuildProgress,
    ) -> None:
        self.options = options
        self.recipe = recipe
        self.name = name = recipe.name(architectures)
        self.architectures = architectures
        self.tools = tools
        self.report = on_progress
        self.work = options.engines / f".building-{name}"
        self.log = options.engines / f"{name}.log"

    def run(self) -> BuildResult:
        began_s = time.monotonic()
        self._start_or_continue()
        if not (self.work / "tree").exists():
            check_disk(self.options.engines, cuda=bool(self.architectures))
        self.report(BuildProgress("source"))
        digest = self.recipe.write(self.work / "source")
        self._compile()
        result = self._collect()
        self.report(BuildProgress("verify", text=str(result / "bin" / "libllama.so")))
        # A CUDA library needs the driver's library, which a machine without a card does not have.
        can_open = not self.architectures or bool(finished.this_host().cuda_architectures)
        if can_open:
            verify(
                result / "bin" / "libllama.so",
                result / "llama.h",
                version=self.recipe.version,
                max_sequences=self.recipe.max_sequences,
            )
        record = self._record(result, digest, verified=can_open, duration_s=round(time.monotonic() - began_s, 1))
        record.write()
        return BuildResult(self._publish(result), was_there=False, log=self.log)

    def _start_or_continue(self) -> None:
        """Keep the folder of an interrupted build if it was configured in the same way."""
        command = self._configuration()
        wanted = json.dumps([command, self.tools.compiler.version, self.tools.nvcc and self.tools.nvcc.version])
        mark = self.work / "configuration.json"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            self.log.unlink(missing_ok=True)
            mark.write_text(wanted, encoding="utf-8")

    def _configuration(self) -> list[str]:
        options = self.recipe.options(self.architectures)
        return configuration(self.work / "source", self.work / "tree", self.tools, options)

    def _compile(self) -> None:
        tree = self.work / "tree"
        self.report(BuildProgress("configure"))
        self._command(self._configuration())
        jobs = self.options.jobs or default_jobs(cuda=bool(self.architectures))
        self._command([str(self.tools.ninja.path), "-C", str(tree), f"-j{jobs}", *self.recipe.targets])

    def _command(self, argv: Sequence[str]) -> None:
        """Run a command with its output in the log; EngineError with the end of the log if it fails."""
        environment = os.environ | {"NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C.UTF-8"}
        with self.log.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {' '.join(argv)}\n")
            with subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                try:
                    for line in process.stdout or ():
                        log.write(line)
                        if match := _STATUS.match(line):
                            self.report(BuildProgress("compile", int(match[1]), int(match[2]), match[3]))
                except BaseException:
                    _stop(process)
                    raise
                code = process.wait()
        if code:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            raise EngineError(
                f"{Path(argv[0]).name} failed with exit code {code}; the log is {self.log}",
                hint="\n".join(["the end of the log:", *lines]),
                code="build_failed",
            )

    def _collect(self) -> Path:
        """The files of the finished build, in a folder of their own."""
        result = self.work / "result"
        shutil.rmtree(result, ignore_errors=True)
        (result / "bin").mkdir(parents=True)
        tree = self.work / "tree"
        libraries = (path for pattern in self.recipe.libraries for path in sorted(tree.glob(pattern)))
        for path in (*libraries, *(tree / "bin" / program for program in self.recipe.programs)):
            shutil.copy2(path, result / "bin" / path.name, follow_symlinks=False)
        shutil.copy2(self.work / "source" / source.HEADER, result / "llama.h")
        return result

    def _record(self, result: Path, digest: str, *, verified: bool, duration_s: float) -> Build:
        processor = this_processor()
        files = [path for path in result.rglob("*") if path.is_file() and not path.is_symlink()]
        return Build(
            name=self.name,
            kind=self.recipe.kind,
            xllamacpp=WHEEL_VERSION,
            llama_version=self.recipe.version,
            max_sequences=self.recipe.max_sequences,
            cuda_architectures=self.architectures,
            cpu=processor.model,
            cpu_isa=processor.isa,
            source_sha256=digest,
            changes_sha256=self.recipe.changes_sha256,
            library_sha256=source.file_digest(result / "bin" / "libllama.so"),
            options=self.recipe.options(self.architectures),
            compiler=self.tools.compiler.version,
            nvcc=self.tools.nvcc.version if self.tools.nvcc else None,
            cmake=self.tools.cmake.version,
            verified=verified,
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=duration_s,
            bytes=sum(path.stat().st_size for path in files),
            folder=result,
        )

    def _publish(self, result: Path) -> Build:
        target = self.options.engines / self.name
        replaced = self.options.engines / f".removed-{self.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        result.rename(target)
        sync_folder(self.options.engines)
        shutil.rmtree(replaced, ignore_errors=True)
        if not self.options.keep_build_tree:
            shutil.rmtree(self.work, ignore_errors=True)
        published = finished.read(target)
        if published is None:
            raise EngineError(f"the build in {target} is not whole", hint=f"see {self.log}", code="build_failed")
        return published


def _recipe(options: BuildOptions, on_progress: OnBuildProgress) -> Recipe:
    def notify(text: str) -> None:
        on_progress(BuildProgress("download", text=text))

    if options.ik:
        return IkLlamaRecipe(ik_source(str(options.source), options.cache, notify))

    def given() -> Path:
        if options.source is not None:
            return Path(options.source).expanduser()
        return source.archive(
            options.cache,
            progress=lambda done, total: on_progress(BuildProgress("download", done, total)),
            notify=notify,
        )

    return LlamaCppRecipe(given, options.max_sequences)


def _identical(options: BuildOptions, recipe: Recipe, architectures: tuple[str, ...]) -> Build | None:
    """A finished build that this one would only repeat."""
    found = finished.read(options.engines / recipe.name(architectures))
    if found is None or found.options != recipe.options(architectures):
        return None
    if found.changes_sha256 != recipe.changes_sha256:
        return None
    processor = this_processor()
    if (found.cpu, found.cpu_isa) != (processor.model, processor.isa):
        return None
    if options.source is not None and recipe.digest() != found.source_sha256:
        return None
    return found


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _lock(engines: Path) -> Iterator[None]:
    engines.mkdir(parents=True, exist_ok=True)
    with (engines / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise EngineError(
                f"another build is running in {engines}, as process {file.read().strip() or 'unknown'}",
                hint="wait until it ends, or stop it",
                code="build_in_progress",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _folder_errors(engines: Path) -> Iterator[None]:
    """Map OSError to errors that name the folder."""
    try:
        yield
    except TokenmillError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"the disk under {engines} is full", hint="free some space and build again") from error
        raise EngineError(
            f"cannot build in {engines}: {error}", hint="set engines_dir to a folder that you may write to"
        ) from error
