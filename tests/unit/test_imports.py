"""No import cycles between modules, counting imports inside functions and under `if TYPE_CHECKING`.

import-linter checks the layers, but leaves out type-checking imports and cycles between the files of one package.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent

ALLOWED = {
    ("tokenmill.planner.plan", "tokenmill.planner.render"): "Plan.__repr__ calls the renderer, which reads a Plan",
}
"""(importer, imported) of a lazy import that closes a cycle: why it stays."""

Graph = Mapping[str, set[str]]


def import_graph(root: Path) -> Graph:
    """Which module of a package imports which other ones, wherever the import statement stands.

    That importing a module runs the `__init__` of its parents is not counted.
    """
    modules = {_name(path, root): path for path in root.rglob("*.py")}
    return {
        name: {found for found in _imports(ast.parse(path.read_text()), modules) if found != name}
        for name, path in modules.items()
    }


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield from [name for name in (submodule, node.module or "") if name in modules][:1]


def cycle_in(graph: Graph) -> list[str] | None:
    """One cycle, each module importing the next one; None if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return None


def test_modules_import_each_other_in_one_direction() -> None:
    graph = {
        name: {found for found in imported if (name, found) not in ALLOWED}
        for name, imported in import_graph(ROOT).items()
    }
    assert len(graph) > 100
    assert cycle_in(graph) is None


@pytest.mark.parametrize("allowed", ALLOWED)
def test_every_allowed_import_still_closes_a_cycle(allowed: tuple[str, str]) -> None:
    graph = import_graph(ROOT)
    others = {name: {found for found in imported if (name, found) not in ALLOWED} for name, imported in graph.items()}
    importer, imported = allowed
    others[importer].add(imported)
    assert cycle_in(others) is not None


@pytest.mark.parametrize(
    "statement",
    [
        "import pack.b",
        "from pack import b",
        "from pack.b import thing",
        "def function():\n    from pack.b import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.b import thing",
    ],
)
def test_a_cycle_is_found_wherever_the_import_stands(tmp_path: Path, statement: str) -> None:
    root = tmp_path / "pack"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "a.py").write_text(statement)
    (root / "b.py").write_text("thing = 1")
    assert cycle_in(import_graph(root)) is None
    (root / "b.py").write_text("from pack.a import other")
    assert set(cycle_in(import_graph(root)) or ()) == {"pack.a", "pack.b"}
