"""What every command shares: data to stdout, talk to stderr, JSON on request.

Colours and widths are rich's business: NO_COLOR is honoured, a pipe gets 80 plain columns.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tokenmill.config import Config, load
from tokenmill.units import format_bytes

_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_NOT_UNICODE = re.compile("[\ud800-\udfff]")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Common:
    """Options that every command takes."""

    json: bool = False
    """Print JSON to stdout and nothing else there."""

    config: Annotated[Path | None, Parameter(name="--config")] = None
    """Configuration file; default: tokenmill.toml here or in the user's configuration folder."""

    def load_config(self) -> Config:
        """Read the configuration that this command runs under."""
        return load(self.config)


def show(*parts: RenderableType) -> None:
    """Print data for a person on stdout."""
    # Names come from files and servers: no markup of theirs is obeyed.
    console = Console(highlight=False, soft_wrap=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    # Tables are padded to their width; a file or a copied terminal should not carry that.
    sys.stdout.write("\n".join(line.rstrip() for line in harmless(capture.get()).split("\n")))


def facts(rows: Mapping[str, str]) -> Table:
    """Labels and what they stand for, one on a line; long ones are folded."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table


def show_text(text: str) -> None:
    """Print text on stdout as it is: something to copy, which must not be folded."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def show_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    # Paths need not be Unicode; what UTF-8 cannot hold is written as JSON's own escape.
    sys.stdout.write(_NOT_UNICODE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def say(text: str) -> None:
    """Print a message for a person on stderr, above the live display if there is one."""
    if isinstance(sys.stderr, FileProxy):  # a live display has replaced it; Console would write over the display
        print(harmless(text), file=sys.stderr)
        return
    Console(stderr=True, highlight=False, emoji=False).print(harmless(text), markup=False, soft_wrap=True)


def harmless(text: str) -> str:
    """Control characters made visible: what a hostile file is called must not steer a terminal. Styles stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def byte_progress() -> Iterator[Progress]:
    """A byte-counting progress bar on stderr; silent when that is not a terminal."""
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
    """A function to call with (bytes done, bytes in total): a bar on a terminal, else one line for every tenth."""
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
    """Dataclasses, enums and paths as plain JSON values; tuples become lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
