"""Installation hints name commands that work: packages that pyproject.toml declares, and no package named tokenmill."""

import re
import tomllib
from pathlib import Path

from tokenmill.version import EXTRAS, __version__, install_hint

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_extras_are_those_of_the_project() -> None:
    declared = dict(PROJECT["optional-dependencies"])
    assert declared.pop("all") == [f"tokenmill[{','.join(EXTRAS)}]"]
    assert declared == {extra: [package] for extra, package in EXTRAS.items()}
    assert PROJECT["version"] == __version__


def test_a_hint_installs_the_package() -> None:
    assert install_hint("postgres") == "pip install 'psycopg[binary]>=3.2,<4'"


def test_no_source_file_names_tokenmill_as_a_package_of_an_index() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "integrations").rglob("src/**/*.py")]
    assert len(files) > 100
    named = re.compile(r"pip install[^\n]*(?:tokenmill\b|tokenmill\[)")
    assert [str(path) for path in files if named.search(path.read_text())] == []
