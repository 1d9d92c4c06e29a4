"""`tokenmill engines log`: shows the end of an engine's log."""

from tokenmill.cli.output import Common, harmless, show_json, show_text
from tokenmill.engine.process import registry
from tokenmill.engine.process.process import last_lines
from tokenmill.errors import UsageError


def log(
    name: str,
    /,
    *,
    lines: int = 40,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Show the last lines of the log of a running or stopped engine.

    Includes lines of the previous process if the current one has written too few.

        tokenmill engines log kimi --lines 100

    Parameters
    ----------
    name:
        Name of the engine.
    lines:
        Number of lines to show.
    """
    path = registry.log_path(common.load_config().state_path, name)
    found = last_lines(path, lines)
    if not path.is_file():
        raise UsageError(f"no log of an engine named {name}", hint=f"expected at {path}")
    if common.json:
        show_json({"log": path, "lines": found})
    else:
        show_text("\n".join(map(harmless, found)))
