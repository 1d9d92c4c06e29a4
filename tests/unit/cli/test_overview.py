"""The overview of all commands, which is made without importing them."""

import subprocess
import sys
from importlib import import_module

import pytest
from cyclopts import App

from tokenmill.cli import _COMMANDS, summary

PLACES = [place for commands in _COMMANDS.values() for place in commands.values()]


@pytest.mark.parametrize("place", PLACES)
def test_summaries_are_those_of_the_commands(place: str) -> None:
    module, _, name = place.partition(":")
    command = getattr(import_module(f"tokenmill.cli.{module}"), name)
    text = command.help if isinstance(command, App) else command.__doc__
    assert summary(place)
    assert summary(place) == text.splitlines()[0]


def test_the_overview_imports_no_command() -> None:
    script = (
        "import sys\n"
        "from tokenmill.cli import run\n"
        "assert run(['--help']) == 0\n"
        "print(*(name for name in sys.modules if name.startswith(('tokenmill.launch', 'tokenmill.planner', 'numpy'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "tokenmill run jobs.jsonl" in done.stdout
    assert done.stdout.splitlines()[-1] == ""
