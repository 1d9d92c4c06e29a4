"""The documentation says what the program says."""

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tokenmill.cli import run

ROOT = Path(__file__).parents[2]


def docs_script() -> ModuleType:
    spec = spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_commands_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked in this process: a start for each of the commands takes a minute. One is, to show that it is the same."""
    script = docs_script()
    plan = script.help_text("plan")

    def help_text(command: str) -> str:
        capsys.readouterr()
        assert run([*command.split(), "--help"]) == 0
        return capsys.readouterr().out.rstrip()

    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    assert help_text("plan") == plan
    monkeypatch.setattr(script, "help_text", help_text)
    assert script.commands_page() == (ROOT / "docs" / "commands.md").read_text(), "python scripts/docs.py mends it"


def test_help_fits_80_columns() -> None:
    too_wide = [line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if len(line) > 80]
    assert too_wide == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())]
    assert len({page for page, _ in links}) > 5
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_python_files_that_are_named_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, path) for page in pages for path in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())}
    assert len(named) > 50
    roots = (ROOT, ROOT / "src", ROOT / "src" / "tokenmill")
    assert [each for each in sorted(named) if not any((root / each[1]).is_file() for root in roots)] == []


def test_the_example_in_the_readme_is_what_is_printed() -> None:
    block = (ROOT / "README.md").read_text().partition("```console\n$ ")[2].partition("```")[0]
    command, *shown = block.splitlines()
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(shown) > 5
    printed = iter(done.stdout.splitlines())
    for line in shown:
        assert line == "..." or line in printed, line  # in this order
