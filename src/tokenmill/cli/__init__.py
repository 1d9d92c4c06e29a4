"""The command line: one file per command. Only this package prints or exits."""

import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from tokenmill.cli.signals import Signalled, exit_code, leave_lost_terminal, raise_on_signals
from tokenmill.errors import DoesNotFit, TokenmillError, UsageError
from tokenmill.version import __version__

_DISK_HINT = "check the path, its permissions and the free space on its disk"

app = App(
    name="tokenmill",
    version=__version__,
    help=(
        "Run large batches on your own hardware with models bigger than your GPU.\n\n"
        "Results go to stdout, messages to stderr; every command takes --json. "
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit.\n\n"
        "Start with `tokenmill probe`, then `tokenmill inspect MODEL`."
    ),
    help_format="markdown",
    default_parameter=Parameter(negative=(), show_default=False),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # cyclopts would exit silently
)
# Commands are registered by module path, so that running one imports no other.
app.command("tokenmill.cli.probe:probe")
app.command("tokenmill.cli.machines:machines")
app.command("tokenmill.cli.inspect:inspect")
app.command("tokenmill.cli.plan:plan")
app.command("tokenmill.cli.models:app", name="models")
app.command("tokenmill.cli.run_jobs:run")
app.command("tokenmill.cli.work:work")
app.command("tokenmill.cli.status:status")
app.command("tokenmill.cli.cancel:cancel")
app.command("tokenmill.cli.retry:retry")
app.command("tokenmill.cli.results:results")
app.command("tokenmill.cli.store:app", name="store")
app.command("tokenmill.cli.lint:lint")
app.command("tokenmill.cli.digest:digest")
app.command("tokenmill.cli.serve:serve")
app.command("tokenmill.cli.keys:app", name="keys")
app.command("tokenmill.cli.engines:app", name="engines")
app.command("tokenmill.cli.doctor:doctor")
app.command("tokenmill.cli.report:report")
app.command("tokenmill.cli.tune:tune")
app.command("tokenmill.cli.bench:bench")
app.command("tokenmill.cli.qualify:qualify")
app.command("tokenmill.cli.history:history")
app.command("tokenmill.cli.soak:soak")
app.command("tokenmill.cli.expand:expand")
app.command("tokenmill.cli.distill:distill")
app.command("tokenmill.cli.summarize:summarize")
app.command("tokenmill.cli.export:export")


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
    """Run one command; every failure becomes `error:` and `hint:` lines and an exit code."""
    _log_to_stderr()
    try:
        if not arguments or arguments[-1] in ("--help", "-h"):
            _load_all(app)
        result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # here, where an error can still be reported
    except CycloptsError as error:
        return _fail(UsageError(str(error), hint=" ".join(["tokenmill", *_command(arguments), "--help"])))
    except TokenmillError as error:
        return _show_misfit(error) if isinstance(error, DoesNotFit) else _fail(error)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Signalled) else signal.SIGINT
        print("interrupted" if number == signal.SIGINT else f"interrupted by {number.name}", file=sys.stderr)
        return exit_code(number)
    except (BrokenPipeError, SystemExit):  # the reader (head, less) has exited; rich raises SystemExit
        _let_go_of_stdout()
        return 0
    except Exception as error:  # noqa: BLE001  every failure is reported and gets an exit code
        return _failed(error)
    return result if isinstance(result, int) else 0


class _Messages(logging.Handler):
    """Send the library's log messages to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        from tokenmill.cli.output import say  # noqa: PLC0415  importing rich is slow

        say(record.getMessage())


def _log_to_stderr() -> None:
    log = logging.getLogger("tokenmill")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Messages) for handler in log.handlers):
        log.addHandler(_Messages())


def _failed(error: Exception) -> int:
    """The exit code for an error that no command expected, which is printed first."""
    if isinstance(error, OSError) and leave_lost_terminal():  # the write failed before SIGHUP arrived
        return exit_code(signal.SIGHUP)
    if os.environ.get("TOKENMILL_TRACEBACK"):
        raise error
    return _fail(_unexpected(error))


def _unexpected(error: Exception) -> TokenmillError:
    if isinstance(error, OSError):
        if error.filename is None:
            _let_go_of_stdout()
        # Most packages map OSError themselves; what is left is a full disk behind stdout or an unreadable folder.
        return TokenmillError(f"{error.filename or 'output'}: {error.strerror or error}", hint=_DISK_HINT)
    return TokenmillError(
        f"internal error: {type(error).__name__}: {error}",
        hint="this is a bug in tokenmill; set TOKENMILL_TRACEBACK=1 for a traceback and please report it",
    )


def _let_go_of_stdout() -> None:
    """Discard unwritten output, so that Python does not report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str]) -> list[str]:
    """The leading arguments that name a command."""
    words: list[str] = []
    group = app
    for word in arguments:
        if word.startswith("-") or word not in group:
            break
        words.append(word)
        group = group[word]
    return words


def _load_all(group: App) -> None:
    """Import every command: the overview shows the first line of each docstring."""
    for name in group:
        if not name.startswith("-"):
            _load_all(group[name])


def _show_misfit(error: DoesNotFit) -> int:
    """Print the plan and its shortfalls to stderr."""
    if error.plan is None:
        return _fail(error)
    from rich.console import Console  # noqa: PLC0415  as below

    from tokenmill.cli.views.plan import render  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    for part in render(error.plan):
        console.print(part)
    return error.exit_code


def _fail(error: TokenmillError) -> int:
    from tokenmill.cli.output import harmless  # noqa: PLC0415  most runs have no error, and importing rich is slow

    print(f"error: {harmless(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {harmless(error.hint)}", file=sys.stderr)
    return error.exit_code
