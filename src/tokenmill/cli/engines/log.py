"""`tokenmill engines log`: what an engine has been saying."""

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
    """Show the last lines of an engine's log, of one that has ended too.

    Parameters
    ----------
    name:
        Its name.
    lines:
        How many lines; default: 40.
    """
    path = registry.log_path(common.load_config().state_path, name)
    found = last_lines(path, lines)
    if not path.is_file():
        raise UsageError(f"no engine of the name {name} has left a log", hint=f"looked for {path}")
    if common.json:
        show_json({"log": path, "lines": found})
    else:
        show_text("\n".join(map(harmless, found)))
