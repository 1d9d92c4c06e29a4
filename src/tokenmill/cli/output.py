"""Output of every command: data on stdout, messages on stderr, JSON on request.

Colours and widths are left to rich, which honours NO_COLOR and writes 80 plain columns to a pipe.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tokenmill.config import Config, load
from tokenmill.units import format_bytes

_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_NOT_UNICODE = re.compile("[\ud800-\udfff]")


@Parameter(name="*", group=Group.create_ordered("General", sort_key=3))
@dataclass(frozen=True, slots=True)
class Common:
    """Options of every command."""

    json: bool = False
    """Print JSON to stdout, and nothing else."""

    config: Annotated[Path | None, Parameter(name="--config", metavar="FILE")] = None
    """Configuration file. [default: tokenmill.toml here or in the user's configuration folder]"""

    def load_config(self) -> Config:
        """Read the configuration of this command."""
        return load(self.config)


def show(*parts: RenderableType) -> None:
    """Print formatted text and tables on stdout."""
    # Names come from files and servers: markup in them is printed as it is.
    console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    # Tables are padded to their width; files and copied text should not contain that.
    sys.stdout.write("\n".join(line.rstrip() for line in harmless(capture.get()).split("\n")))


def facts(rows: Mapping[str, str]) -> Table:
    """A table of labels and values, one pair per row; long values are folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table


def show_text(text: str) -> None:
    """Print text on stdout without folding it, so that it can be copied."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def show_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    # Paths need not be Unicode; bytes that UTF-8 cannot encode are written as JSON escapes.
    sys.stdout.write(_NOT_UNICODE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def say(text: str, *, style: str | None = None) -> None:
    """Print a message on stderr, above the live display if there is one."""
    if isinstance(sys.stderr, FileProxy):  # replaced by a live display, which a new Console would overwrite
        print(harmless(text), file=sys.stderr)
        return
    Console(stderr=True, highlight=False, emoji=False).print(harmless(text), markup=False, soft_wrap=True, style=style)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {text}", style="bold yellow")


def harmless(text: str) -> str:
    """Escape control characters, so that hostile file names cannot control the terminal; styles are kept."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def byte_progress() -> Iterator[Progress]:
    """A byte-counting progress bar on stderr; disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def byte_report(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A callback for (bytes done, total bytes) that draws a bar on a terminal, or prints a line at every tenth."""
    with byte_progress() as bars:
        task = bars.add_task(name, start=False, visible=False)
        tenths = 0

        def report(done: int, total: int | None) -> None:
            nonlocal tenths
            bars.start_task(task)
            bars.update(task, completed=done, total=total, visible=True)
            if bars.disable and total and done * 10 // total > tenths:
                tenths = done * 10 // total
                say(f"{name}: {format_bytes(done)} of {format_bytes(total)}")

        yield report


def jsonable(value: Any) -> Any:
    """Dataclasses, enums and paths as plain JSON values; `json` in the metadata of a field is its key."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.metadata.get("json", field.name): jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
