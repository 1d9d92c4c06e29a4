"""The examples of docs/api.md run as written, against a gateway on another port."""

import re
from pathlib import Path

import pytest

from support.gateway import config_in, native_engine, served

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HOST = "http://127.0.0.1:8181"


def test_the_examples_run_in_order(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    namespace: dict[str, object] = {}
    with served(native_engine(smollm2_path), config_in(tmp_path)) as gateway:
        for block in blocks:  # in one namespace; a traceback has the page's line numbers
            source = "\n" * page.count("\n", 0, block.start(1)) + block[1].replace(HOST, gateway.url)
            exec(compile(source, str(PAGE), "exec"), namespace)
        for name in ("client", "claude"):
            namespace[name].close()  # type: ignore[attr-defined]
    assert "images_not_supported" in capsys.readouterr().out
