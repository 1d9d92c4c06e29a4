"""Writes the generated parts of the documentation; --check fails when they are not up to date.

docs/commands.md holds every command's --help at 80 columns.
"""

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
    """One command's help as a person sees it in an 80-column terminal without colours."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    argv = [sys.executable, "-m", "tokenmill", *command.split(), "--help"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()


def commands_page() -> str:
    """docs/commands.md."""
    parts = ["# Commands\n\nMade from `--help` by `python scripts/docs.py`.\n"]
    for command in commands():
        name = f"tokenmill {command}".strip()
        parts.append(f"## {name}\n\n```text\n{help_text(command)}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Write, or compare with --check."""
    page, path = commands_page(), ROOT / "docs" / "commands.md"
    if "--check" not in sys.argv:
        path.write_text(page)
    elif not path.is_file() or path.read_text() != page:
        sys.exit(f"error: {path.relative_to(ROOT)} is out of date\nhint: python scripts/docs.py")


if __name__ == "__main__":
    main()
