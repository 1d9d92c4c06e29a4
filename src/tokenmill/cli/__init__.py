"""The command line: one file per command. Only this package prints or exits."""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.help import DefaultFormatter, HelpPanel

from tokenmill.cli.signals import Signalled, exit_code, leave_lost_terminal, raise_on_signals
from tokenmill.errors import DoesNotFit, TokenmillError, UsageError
from tokenmill.version import __version__

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_DISK_HINT = "check the path, its permissions and the free space on its disk"
_COMMANDS = {
    "Plan": {
        "probe": "planning.probe:probe",
        "doctor": "planning.doctor:doctor",
        "machines": "planning.machines:machines",
        "models": "models:app",
        "inspect": "planning.inspect:inspect",
        "plan": "planning.plan:plan",
    },
    "Run batches": {
        "lint": "batches.lint:lint",
        "digest": "batches.digest:digest",
        "run": "batches.run:run",
        "attach": "batches.attach:attach",
        "work": "batches.work:work",
        "status": "batches.status:status",
        "results": "batches.results:results",
        "retry": "batches.retry:retry",
        "cancel": "batches.cancel:cancel",
        "store": "batches.store:app",
    },
    "Serve": {"serve": "serving.serve:serve", "keys": "serving.keys:app", "engines": "engines:app"},
    "Recipes": {
        "expand": "recipes.expand:expand",
        "distill": "recipes.distill:distill",
        "export": "recipes.export:export",
        "summarize": "recipes.summarize:summarize",
    },
    "Measure": {
        "tune": "measuring.tune:tune",
        "bench": "measuring.bench:bench",
        "soak": "measuring.soak:soak",
        "qualify": "measuring.qualify:qualify",
        "history": "measuring.history:history",
        "report": "measuring.report:report",
    },
    "Shell": {"completion": "completion:completion"},
}
"""The commands by panel of the overview, each with its module and function."""
_PLACEHOLDERS = {
    "--model": "MODEL",
    "--machine": "MACHINE",
    "--engine": "ENGINE",
    "--binary": "FILE",
    "--gpus": "LIST",
    "--fit-margin": "LIST",
    "--cache-type": "TYPE",
    "--cache-type-k": "TYPE",
    "--cache-type-v": "TYPE",
    "--type": "TYPE",
    "--column": "COLUMN",
    "--prompts": "FOLDER",
    "--write-prompts": "FOLDER",
    "--schema": "FILE",
    "--system": "FILE",
    "--digest": "FILE",
    "--language": "LANGUAGE",
    "--stop": "TEXT",
    "--body": "JSON",
    "INT": "N",
    "FLOAT": "N",
}
"""What an option's help shows for its value, by option or else by cyclopts' name of its type."""


class _HelpFormatter(DefaultFormatter):
    """Replaces the placeholders of values, such as `--context INT` by `--context N`."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: HelpPanel) -> None:
        entries = []
        for entry in panel.entries:
            name = next((name for name in entry.positive_names if name in _PLACEHOLDERS), entry.metavar)
            entries.append(entry.copy(metavar=_PLACEHOLDERS.get(name or "", entry.metavar)))
        super().__call__(console, options, panel.copy(entries=entries))


def _shown_default(value: object) -> str | None:
    """The default in an option's help; None hides it, for flags and for options that are unset."""
    if value is None or value is False or value == ():
        return None
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _application() -> App:
    """The application without its commands."""
    return App(
        name="tokenmill",
        version=__version__,
        help=(
            "Run large batches on your own hardware with models bigger than your GPU.\n\n"
            "Results go to stdout, messages to stderr; every command takes --json. "
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit.\n\n"
            "    tokenmill probe\n"
            "    tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f\n"
            "    tokenmill run jobs.jsonl -o results.jsonl --model kimi.gguf"
        ),
        help_format="markdown",
        help_formatter=_HelpFormatter(),
        default_parameter=Parameter(negative=(), show_default=_shown_default),
        group_parameters=Group.create_default_parameters("Options"),
        result_action="return_value",
        suppress_keyboard_interrupt=False,  # cyclopts would exit silently
    )


def _panels() -> Iterator[tuple[Group, int, str, str]]:
    """The panel, the position in it, the name and the place of every command."""
    for title, commands in _COMMANDS.items():
        panel = Group.create_ordered(title)
        yield from ((panel, position, name, place) for position, (name, place) in enumerate(commands.items()))


app = _application()
for _panel, _position, _name, _place in _panels():
    # By module path, so that running one command imports no other.
    app.command(f"tokenmill.cli.{_place}", name=_name, group=_panel, sort_key=_position)
app["--help"].group = app["--version"].group = Group.create_ordered("Help")


def overview() -> App:
    """The application for its own help: every command has only a summary. Importing all commands takes a second."""
    made = _application()
    for panel, position, name, place in _panels():
        made.command(App(name=name, help=summary(place), group=panel, sort_key=position))
    made["--help"].group = made["--version"].group = Group.create_ordered("Help")
    return made


def summary(place: str) -> str:
    """The first line of a command's docstring, or the help of a group, read from the source."""
    module, _, name = place.partition(":")
    path = Path(__file__).parent.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    pattern = r'^app = App\(.*?help="([^"]*)"' if name == "app" else rf'^def {name}\(.*?"""([^\n"]*)'
    found = re.search(pattern, source, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code."""
    if sys.stdout is None:  # started with >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths need not be Unicode; print their original bytes.
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding == "utf-8" else "backslashreplace")
    raise_on_signals()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every failure is reported."""
    _log_to_stderr()
    try:
        words, group = _command(arguments)
        shows_help = list(arguments[len(words) :]) in ([], ["--help"], ["-h"])
        if shows_help and words:
            _load_all(group)
        called = overview() if shows_help and not words else app
        result = called(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # here, where an error can still be reported
    except CycloptsError as error:
        failure: TokenmillError = UsageError(
            str(error), hint=" ".join(["tokenmill", *_command(arguments)[0], "--help"])
        )
    except TokenmillError as error:
        failure = error
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Signalled) else signal.SIGINT
        print("interrupted" if number == signal.SIGINT else f"interrupted by {number.name}", file=sys.stderr)
        return exit_code(number)
    except (BrokenPipeError, SystemExit):  # the reader (head, less) has exited; rich raises SystemExit
        _discard_stdout()
        return 0
    except Exception as error:  # noqa: BLE001  every failure is reported and gets an exit code
        if isinstance(error, OSError) and leave_lost_terminal():  # the write failed before SIGHUP arrived
            return exit_code(signal.SIGHUP)
        failure = _unexpected(error)
    else:
        return result if isinstance(result, int) else 0
    return _fail(failure, as_json="--json" in arguments)


class _Messages(logging.Handler):
    """Send the library's log messages to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        from tokenmill.cli.output import say, warn  # noqa: PLC0415  importing rich is slow

        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            say(record.getMessage())


def _log_to_stderr() -> None:
    log = logging.getLogger("tokenmill")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Messages) for handler in log.handlers):
        log.addHandler(_Messages())


def _unexpected(error: Exception) -> TokenmillError:
    """The report of an error that no command raises on purpose."""
    if os.environ.get("TOKENMILL_TRACEBACK"):
        raise error
    if isinstance(error, OSError):
        if error.filename is None:
            _discard_stdout()
        # Most packages map OSError themselves; a full disk behind stdout and unreadable folders arrive here.
        return TokenmillError(f"{error.filename or 'output'}: {error.strerror or error}", hint=_DISK_HINT)
    return TokenmillError(
        f"internal error: {type(error).__name__}: {error}",
        hint="this is a bug in tokenmill; set TOKENMILL_TRACEBACK=1 for a traceback and please report it",
    )


def _discard_stdout() -> None:
    """Discard unwritten output, so that Python does not report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str]) -> tuple[list[str], App]:
    """The leading arguments that name a command, and the command."""
    words: list[str] = []
    group = app
    for word in arguments:
        if word.startswith("-") or word not in group:
            break
        words.append(word)
        group = group[word]
    return words, group


def _load_all(group: App) -> None:
    """Import every command of a group, because its overview shows the first line of each docstring."""
    for name in group:
        if not name.startswith("-"):
            _load_all(group[name])


def _fail(error: TokenmillError, *, as_json: bool) -> int:
    """Print an error, or the plan that does not fit, to stderr, and with --json a document to stdout."""
    from tokenmill.cli import output  # noqa: PLC0415  most runs have no error, and importing rich is slow

    if as_json:
        with suppress(OSError):  # stdout may be what failed
            output.show_json({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
            sys.stdout.flush()
    if isinstance(error, DoesNotFit) and error.plan is not None:
        from rich.console import Console  # noqa: PLC0415  as above

        from tokenmill.cli.views.plan import render  # noqa: PLC0415

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        for part in render(error.plan):
            console.print(part)
        return error.exit_code
    print(f"error: {output.harmless(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {output.harmless(error.hint)}", file=sys.stderr)
    return error.exit_code
