"""The documentation agrees with the program: help texts, make targets, links, file names, the README's example."""

import re
import shlex
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
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Help is rendered in this process, because starting every command takes a minute; one process checks the equality."""
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
    assert script.pages() == script.written(), "run: python scripts/docs.py"


def test_help_fits_80_columns() -> None:
    pages = [path.read_text() for path in (ROOT / "docs" / "commands").glob("*.md")]
    assert len(pages) > 5
    assert [line for page in pages for line in page.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_named_make_targets_exist(page: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "integrations").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]


def test_links_lead_to_files_and_headings() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())]
    assert len({page for page, _ in links}) > 20
    assert [(page.name, link) for page, link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_named_python_files_exist() -> None:
    named = {(page.name, path) for page in PAGES for path in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())}
    assert len(named) > 50
    roots = (ROOT, ROOT / "src", ROOT / "src" / "tokenmill")
    assert [each for each in sorted(named) if not any((root / each[1]).is_file() for root in roots)] == []


def shown_plans() -> list[tuple[str, str, str]]:
    """The plans for catalogue machines that the documentation shows: page, command and output."""
    session = re.compile(r"^```console\n\$ tokenmill (plan (?:.*\\\n)*.*)\n((?:.*\n)*?)```", re.MULTILINE)
    every = [(page.name, *found.groups()) for page in PAGES for found in session.finditer(page.read_text())]
    return [(page, command.replace("\\\n", " "), output) for page, command, output in every]


@pytest.mark.parametrize(("page", "command", "output"), shown_plans())
def test_shown_plans_are_what_plan_prints(
    page: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    run(shlex.split(command))
    printed = iter(capsys.readouterr().out.splitlines())
    shown = output.splitlines()
    assert len(shown) > 3
    for line in shown:
        assert line == "..." or line in printed, f"{page}: {line}"  # in this order


def test_plans_are_shown() -> None:
    assert {"README.md", "tutorial.md"} <= {page for page, _, _ in shown_plans()}
