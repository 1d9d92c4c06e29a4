"""The public API: every name resolves and is documented, and other packages use nothing else."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill
import tokenmill.recipes

ROOT = Path(__file__).parents[2]
PUBLIC = {"tokenmill", "tokenmill.errors", "tokenmill.recipes"}
CLIENTS = sorted([*(ROOT / "integrations").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


@pytest.mark.parametrize("package", ["tokenmill", "tokenmill.recipes"])
def test_every_name_resolves_and_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_every_name_is_on_the_page_about_python() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in tokenmill.__all__ if name not in page and name != "__version__"] == []


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tokenmill.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tokenmill.recipes.nothing


def test_the_import_is_light() -> None:
    """The processes of an engine import this package too."""
    script = "import sys, tokenmill; print(*sorted(name for name in sys.modules if name.startswith('tokenmill')))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["tokenmill", "tokenmill.version"]


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_clients_import_the_public_api_only(path: Path) -> None:
    assert imported(path) <= PUBLIC


def imported(path: Path) -> set[str]:
    """The modules of tokenmill that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "tokenmill"}
