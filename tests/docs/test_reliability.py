"""docs/reliability.md names only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_named_test_file_exists() -> None:
    named = re.findall(r"`((?:tests|bench)/[\w/]+\.py)`", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
