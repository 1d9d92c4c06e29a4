"""Writes docs/commands.md, the --help of every command at 80 columns; --check fails if the file is out of date."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from tokenmill.cli import app

ROOT = Path(__file__).parents[1]


def commands(group: App | None = None, path: str = "") -> Iterator[str]:
    """Every command and group of the application, each group before its commands."""
    group = group or app
    yield path
    for name in group:
        if not name.startswith("-"):
            yield from commands(group[name], f"{path} {name}".strip())


def help_text(command: str) -> str:
    """A command's --help in an 80-column terminal without colours."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    argv = [sys.executable, "-m", "tokenmill", *command.split(), "--help"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()


def commands_page() -> str:
    """The content of docs/commands.md."""
    parts = ["# Commands\n\nMade from `--help` by `python scripts/docs.py`.\n"]
    for command in commands():
        name = f"tokenmill {command}".strip()
        parts.append(f"## {name}\n\n```text\n{help_text(command)}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Write the page, or compare it with --check."""
    page = commands_page()
    path = ROOT / "docs" / "commands.md"
    if "--check" not in sys.argv:
        path.write_text(page)
    elif not path.is_file() or path.read_text() != page:
        sys.exit(f"error: {path.relative_to(ROOT)} is out of date\nhint: python scripts/docs.py")


if __name__ == "__main__":
    main()
