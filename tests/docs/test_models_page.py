"""The page on models lists the catalogue."""

import re
from pathlib import Path

from tokenmill.model import catalog

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_has_every_model_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().split("## Catalogue")[1].splitlines() if line.startswith("|")]
    assert sorted(re.findall(r"`([^`]+)`", "\n".join(rows))) == list(catalog.names())


def test_names_in_the_text_resolve() -> None:
    text = PAGE.read_text().split("Shorter names")[1].partition("For other")[0]
    for name in re.findall(r"`([a-z0-9.:_A-Z-]+)`", text):
        assert catalog.known(name.partition(":")[0])
        if ":" in name:
            assert catalog.resolve(name)[1] == name.partition(":")[2]
