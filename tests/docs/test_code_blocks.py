"""Every code block of the documentation can be used: commands and files in it are parsed.

`test_python_page.py` also runs the examples of docs/python.md, `test_generated.py` the plan of the README.
"""

import configparser
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from cyclopts import CycloptsError

from tokenmill.cli import app
from tokenmill.config import load
from tokenmill.errors import TokenmillError

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "docs" / "commands"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent != COMMANDS),
    *(ROOT / "integrations").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]
GENERATED = ROOT / "docs" / "sample-report" / "README.md"  # by `tokenmill report`, whose blocks name no language
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_ENDS = re.compile(r"&&|\|\||[|;<>&]")  # what ends a command on a line of shell


class Block(NamedTuple):
    place: str  # page and line
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))


def lines_of_shell(block: Block) -> Iterator[str]:
    """The lines to type: of a console session those behind a prompt, joined where they continue."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language != "console":
            yield line
        elif typed := re.match(r"(?:[\w-]+)?[$#] (.*)", line):
            yield typed[1]


def commands_in(line: str) -> Iterator[list[str]]:
    """The arguments of every tokenmill command on a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not _ENDS.match(word):
            words.append(word)
            continue
        if "tokenmill" in words and not {"pip", "uv", "install", "cd"} & set(words[: words.index("tokenmill")]):
            yield words[words.index("tokenmill") + 1 :]
        words = []


def parse_command(words: list[str]) -> None:
    """Raises unless the command accepts these arguments."""
    if words and "--help" not in words and "--version" not in words:
        app.parse_args(words, exit_on_error=False, print_error=False)


def check_shell(block: Block) -> None:
    lines = list(lines_of_shell(block))
    checked = subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for line in lines:
        for words in commands_in(line):
            parse_command(words)


def check_crontab(block: Block) -> None:
    for line in block.text.splitlines():
        if not line.startswith("#"):
            check_shell(Block(block.place, "sh", line.split(maxsplit=5)[5]))


def check_toml(block: Block, folder: Path) -> None:
    """A configuration, or a fleet, whose machine files are not here."""
    if "hosts" not in tomllib.loads(block.text):
        path = folder / "tokenmill.toml"
        path.write_text(block.text, encoding="utf-8")
        load(path)


def checks(folder: Path) -> dict[str, Callable[[Block], object]]:
    return {
        "sh": check_shell,
        "console": check_shell,
        "crontab": check_crontab,
        "python": lambda block: compile(block.text, block.place, "exec"),
        "toml": partial(check_toml, folder=folder),
        "json": lambda block: json.loads(block.text),
        "jsonl": lambda block: [json.loads(line) for line in block.text.splitlines()],
        "yaml": lambda block: yaml.safe_load(block.text),
        "ini": lambda block: configparser.ConfigParser(strict=False).read_string(block.text),
        "text": lambda block: None,
    }


def test_every_block_can_be_used(tmp_path: Path) -> None:
    known = checks(tmp_path)
    problems: list[str] = []
    count = 0
    for block in blocks():
        count += 1
        if block.language not in known:
            if not block.place.startswith(str(GENERATED.relative_to(ROOT))):
                problems.append(f"{block.place}: no known language ({block.language!r})")
            continue
        try:
            known[block.language](block)
        except (AssertionError, CycloptsError, TokenmillError, ValueError, SyntaxError, configparser.Error) as error:
            problems.append(f"{block.place}: {error}")
    assert count > 80
    assert not problems, "\n".join(problems)


def leaves() -> list[str]:
    spec = spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    every = [name for names in script.panels().values() for name in names]
    return [name for name in every if not any(other.startswith(f"{name} ") for other in every)]


def examples() -> dict[str, list[str]]:
    """The examples in the help of each command, at 80 columns."""
    found: dict[str, list[str]] = {}
    for page in COMMANDS.glob("*.md"):
        for section in page.read_text(encoding="utf-8").split("\n## tokenmill ")[1:]:
            name, _, rest = section.partition("\n")
            found[name] = [line.strip() for line in rest.partition("╭─")[0].splitlines() if line[:1] == " "]
    return found


@pytest.mark.parametrize("name", leaves())
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    shown = [line for line in examples()[name] if line]
    assert shown
    assert [line for line in shown if not line.startswith("tokenmill ")] == []  # a longer one would be folded
    assert any(line.startswith(f"tokenmill {name}") for line in shown)
    for line in shown:
        for words in commands_in(line):
            parse_command(words)
