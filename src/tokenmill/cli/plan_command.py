"""A plan's command for a terminal: one flag on each line."""

import shlex

from tokenmill.planner.plan import Command


def folded(command: Command) -> str:
    """One flag on a line."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in command.env.items()]
    line = ""
    for word in command.argv:
        if word.startswith("-") and line:
            lines.append(f"{line} \\")
            line = "   "
        line = f"{line} {shlex.quote(word)}" if line else shlex.quote(word)
    return "\n".join([*lines, line])
