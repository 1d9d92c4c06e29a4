"""A qualification for a terminal of 80 columns: a line for each check, then its first failures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts, harmless, say
from tokenmill.tuner.qualify.result import Check, QualifyStep, Tell
from tokenmill.units import number_of

_SHOWN = 2  # failures of each check
_LINES = 3  # of a wrong answer


def rendered(found: dict[str, Any], checks: Sequence[Check]) -> list[RenderableType]:
    """The result at 80 columns."""
    rows = {"model": found["model"], "engine": f"{found['engine']}, {found['build']}"}
    if found["against"]:
        rows["reference"] = found["against"]
    rows["verdict"] = found["verdict"]
    table = Table("check", box=None, pad_edge=False)
    for name in ("score", "required"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("", overflow="fold")
    for check in checks:
        mark = Text("pass", style="green") if check.good else Text("fail", style="bold red")
        table.add_row(check.name, f"{check.score:.0%}", f"{check.threshold:.0%}", mark, check.words)
    parts: list[RenderableType] = [facts(rows), Text(), table]
    for check in checks:
        parts += _failures(check)
    return parts


def _failures(check: Check) -> Iterator[RenderableType]:
    for failure in check.failures[:_SHOWN]:
        yield Text()
        yield Text.assemble((f"{check.name}: ", "bold"), failure.asked)
        yield Padding(Text(harmless(failure.why), style="yellow"), (0, 0, 0, 2))
        answer = harmless("\n".join(failure.said.splitlines()[:_LINES]))
        if answer:
            yield Padding(Text(answer, style="dim"), (0, 0, 0, 4))


@contextmanager
def steps_shown() -> Iterator[Tell]:
    """Progress on stderr: a bar for each check, or one log line for each where that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LogLines().show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"))
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress).show


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, step: QualifyStep) -> None:
        title = _title(step)
        if title not in self._tasks:
            self._tasks[title] = self._progress.add_task(title, total=step.total)
        self._progress.update(self._tasks[title], completed=step.done, total=step.total)


class _LogLines:
    def __init__(self) -> None:
        self._title = ""

    def show(self, step: QualifyStep) -> None:
        if _title(step) != self._title:
            self._title = _title(step)
            say(f"{self._title}: {number_of(step.total, 'prompt')}")


def _title(step: QualifyStep) -> str:
    return f"{step.check} ({step.of})" if step.of else step.check
