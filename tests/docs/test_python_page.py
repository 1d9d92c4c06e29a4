"""The examples of docs/python.md run as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 500


def test_the_examples_run_in_order(smollm2_path: Path, tmp_path: Path) -> None:
    assert smollm2_path.exists()
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert blocks
    lines = ["namespace = {'__name__': '__main__'}"]
    for block in blocks:  # in one namespace; a traceback has the page's line numbers
        source = "\n" * page.count("\n", 0, block.start(1)) + block[1]
        lines.append(f"exec(compile({source!r}, 'docs/python.md', 'exec'), namespace)")
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "does_not_fit" in done.stdout
    assert "context_length_exceeded" in done.stdout
