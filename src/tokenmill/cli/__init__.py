"""The command line: one command per file, and the only room that prints or exits."""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from tokenmill import __version__
from tokenmill.errors import TokenmillError, UsageError

app = App(
    name="tokenmill",
    version=__version__,
    help=(
        "Run models that are too big for the machine, on the machine you own.\n\n"
        "Data goes to stdout, everything else to stderr; every command takes --json. "
        "Exit codes: 0 done, 1 failed, 2 wrong use, 3 does not fit.\n\n"
        "Start with `tokenmill probe`, then `tokenmill inspect MODEL`."
    ),
    help_format="markdown",
    default_parameter=Parameter(negative=(), show_default=False),
    result_action="return_value",
)
# Commands are named by module so that running one imports only that one.
app.command("tokenmill.cli.probe:probe")
app.command("tokenmill.cli.machines:machines")
app.command("tokenmill.cli.inspect:inspect")
app.command("tokenmill.cli.models:app", name="models")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code the operator can rely on."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; every failure becomes `error:` and `hint:` lines and an exit code."""
    try:
        if not arguments or arguments[-1] in ("--help", "-h"):
            _load_all(app)
        result = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        words = [word for word in arguments if not word.startswith("-")][:1]
        return _fail(UsageError(str(error), hint=f"tokenmill {' '.join([*words, '--help'])}"))
    except TokenmillError as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) is gone; keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("TOKENMILL_TRACEBACK"):
            raise
        return _fail(TokenmillError(
            f"tokenmill itself failed: {type(error).__name__}: {error}",
            hint="this is a bug; TOKENMILL_TRACEBACK=1 shows where, please report it",
        ))  # fmt: skip
    return result if isinstance(result, int) else 0


def _load_all(group: App) -> None:
    """Import every command, for an overview needs their first sentences."""
    for name in group:
        if not name.startswith("-"):
            _load_all(group[name])


def _fail(error: TokenmillError) -> int:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
