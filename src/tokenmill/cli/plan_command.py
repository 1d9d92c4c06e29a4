"""A plan's command on paper: the model's file in it, and one flag on a line."""

import shlex
from pathlib import Path

from tokenmill.engine.dialects import Command
from tokenmill.model import catalog


def file_name(model: str) -> str:
    """What stands for the model in a command: its file, or the file that its name would have."""
    if Path(model).exists() or not catalog.looks_like_name(model):
        return model
    return f"/path/to/models/{model.replace(':', '-')}.gguf"


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
