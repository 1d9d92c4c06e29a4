"""Progress of downloads, loads and batches on stderr: bars on a terminal, occasional lines elsewhere."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tokenmill.api.engines import choose as api
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.api.progress import Download, Measuring, OnProgress, described
from tokenmill.api.progress import Progress as Event
from tokenmill.cli.output import Common, byte_progress, say
from tokenmill.cli.views.run_progress import measuring_shown, progress_shown
from tokenmill.engine.engine import Engine
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.warm import WarmProgress

_LINE_STEP = 0.1  # without a terminal, one line per tenth of a load


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A callback that draws the events of `tokenmill.api`, one display at a time."""
    with ExitStack() as stack:
        display = _Display(stack)
        yield display.show


class _Display:
    """The display of the current phase; the next phase's display replaces it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._phase: type[object] | None = None
        self._draw: Callable[[Event], None] = lambda _event: None

    def show(self, event: Event) -> None:
        """Draw an event."""
        phase = LoadProgress if isinstance(event, WarmProgress) else type(event)
        if phase is not self._phase:
            self._stack.close()
            self._phase = phase
            self._draw = self._display_for(event)
        self._draw(event)

    def _display_for(self, event: Event) -> Callable[[Event], None]:
        if isinstance(event, Download):
            return _download_bar(self._stack, event.model)
        if isinstance(event, LoadProgress | WarmProgress):
            return self._stack.enter_context(load_shown())  # type: ignore[return-value]
        if isinstance(event, Measuring):
            words = self._stack.enter_context(measuring_shown())
            return lambda now: words(now.text) if isinstance(now, Measuring) else None
        return self._stack.enter_context(progress_shown())  # type: ignore[return-value]


def _download_bar(stack: ExitStack, model: str) -> Callable[[Event], None]:
    bars = stack.enter_context(byte_progress())
    task = bars.add_task(model)

    def draw(event: Event) -> None:
        if isinstance(event, Download):
            bars.update(task, completed=event.done_bytes, total=event.total_bytes)

    return draw


@contextmanager
def load_shown() -> Iterator[Callable[[LoadProgress | WarmProgress], None]]:
    """A callback that draws a bar for a load and its warm-up on stderr, or prints lines if it is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _with_notes(_Lines().print)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None, words="")
        yield _with_notes(lambda now: _draw(progress, task, now))


def _with_notes(draw: Callable[[LoadProgress | WarmProgress], None]) -> Callable[[LoadProgress | WarmProgress], None]:
    """Print each note of a start as a line of its own, once, and draw the other events."""
    printed: set[str] = set()

    def show(now: LoadProgress | WarmProgress) -> None:
        if not isinstance(now, LoadProgress) or now.phase != "starting" or now.bytes_total or now.detail is None:
            draw(now)
        elif now.detail not in printed:
            printed.add(now.detail)
            say(now.detail)

    return show


def _draw(progress: Progress, task: TaskID, now: LoadProgress | WarmProgress) -> None:
    title, share, words = described(now)
    progress.update(task, description=title, words=words, total=None if share is None else 1.0, completed=share or 0.0)


class _Lines:
    """Prints one line per stage, and one per tenth of a long stage."""

    def __init__(self) -> None:
        self._title = ""
        self._printed = 0.0

    def print(self, now: LoadProgress | WarmProgress) -> None:
        title, share, words = described(now)
        if title != self._title or (share or 0.0) >= self._printed + _LINE_STEP:
            self._title = title
            self._printed = share or 0.0
            say(f"{title} {words}".rstrip())


def choose(model: str | None, options: EngineOptions, common: Common, *, dry_run: bool = False) -> EngineChoice:
    """`api.choose_engine` with a progress bar for the download."""
    with shown_progress() as on_progress:
        return api.choose_engine(model, options, common.load_config(), on_progress, dry_run=dry_run)


@asynccontextmanager
async def opened(choice: EngineChoice, planned: EnginePlan | None, folder: Path) -> AsyncIterator[Engine]:
    """`api.open_engine` with a progress bar for the load."""
    async with AsyncExitStack() as stack:
        with shown_progress() as on_progress:
            engine = await stack.enter_async_context(api.open_engine(choice, planned, folder, on_progress))
        yield engine
