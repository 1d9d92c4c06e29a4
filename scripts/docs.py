"""Writes docs/commands/, the --help of every command at 80 columns; --check fails if a page is out of date."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from tokenmill.cli import app

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "commands"
_MADE = "Made from `--help` by `python scripts/docs.py`."


def commands(group: App, path: str) -> Iterator[str]:
    """A command and, if it is a group, every command in it."""
    yield path
    for name in group:
        if not name.startswith("-"):
            yield from commands(group[name], f"{path} {name}")


def panels() -> dict[str, list[str]]:
    """The commands of the application by panel of its overview, groups before their commands."""
    panels: dict[str, list[str]] = {}
    for name in app:
        if not name.startswith("-"):
            (panel,) = app[name].group
            panels.setdefault(panel.name, []).extend(commands(app[name], name))
    return panels


def help_text(command: str) -> str:
    """A command's --help in an 80-column terminal without colours."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    argv = [sys.executable, "-m", "tokenmill", *command.split(), "--help"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()


def pages() -> dict[str, str]:
    """The content of every page of docs/commands, by file name."""
    names = {panel: f"{panel.split()[0].lower()}.md" for panel in panels()}
    links = "\n".join(f"- [{panel}]({name})" for panel, name in names.items())
    overview = f"# Commands\n\n{_MADE} One page for each group:\n\n{links}\n\n```text\n{help_text('')}\n```\n"
    return {"index.md": overview} | {names[panel]: _page(panel, commands) for panel, commands in panels().items()}


def _page(title: str, commands: list[str]) -> str:
    parts = [f"# Commands: {title}\n\n{_MADE}\n"]
    parts += (f"## tokenmill {command}\n\n```text\n{help_text(command)}\n```\n" for command in commands)
    return "\n".join(parts)


def written() -> dict[str, str]:
    """The pages that docs/commands has now."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}


def main() -> None:
    """Write the pages, or compare them with --check."""
    made, found = pages(), written()
    if "--check" not in sys.argv:
        FOLDER.mkdir(exist_ok=True)
        for name in found.keys() - made.keys():
            (FOLDER / name).unlink()
        for name, text in made.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    elif made != found:
        sys.exit("error: docs/commands is out of date\nhint: python scripts/docs.py")


if __name__ == "__main__":
    main()
