"""Every name that a package offers exists. The packages import lazily, so only a look at each name finds a wrong one."""

import pytest

import tokenmill
import tokenmill.launch
import tokenmill.recipes


@pytest.mark.parametrize("package", [tokenmill, tokenmill.launch, tokenmill.recipes], ids=lambda it: it.__name__)
def test_all_names_exist(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert names
    assert [name for name in names if not hasattr(package, name)] == []
