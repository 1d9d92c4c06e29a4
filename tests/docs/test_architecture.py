"""docs/architecture.md names only files that exist, at least one in every numbered step."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
_PATH = re.compile(r"`([\w/]+\.py)`")


def test_every_named_file_exists() -> None:
    named = _PATH.findall(PAGE)
    assert len(named) > 50
    assert [path for path in named if not (ROOT / "src/tokenmill" / path).is_file()] == []


def test_every_step_names_a_file() -> None:
    steps = re.findall(r"^\d+\. .*(?:\n +.*)*", PAGE, re.MULTILINE)
    assert len(steps) > 30
    assert [step for step in steps if not _PATH.search(step)] == []


def test_every_package_is_in_the_layers() -> None:
    diagram = PAGE.partition("```text\n")[2].partition("```")[0]
    packages = [path.parent.name for path in (ROOT / "src/tokenmill").glob("*/__init__.py")]
    assert len(packages) > 10
    assert [name for name in packages if not re.search(rf"\b{name}\b", diagram)] == []
