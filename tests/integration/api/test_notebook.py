"""The examples in a notebook, whose Jupyter kernel already runs an event loop."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

LIMIT_S = 400
PLAN = """\
import tokenmill

plan = tokenmill.plan("kimi-k2.5:Q4_K_S", machine="epyc-9175f", context=32768)
plan"""
FACTS = "plan.fits, plan.memory['gpu0'].used_bytes > 0, plan.forecast.decode_tok_s > 0"
LOAD = """\
prompts = ["Say hello.", "Name a colour."]
with tokenmill.load("smollm2", context=4096, sequences=2, threads=1) as engine:
    print(engine.chat("Say hello.", max_tokens=8).text)
    for answer in engine.map(prompts, max_tokens=8):
        print(answer.usage.completion_tokens)"""
RUN = """\
summary = tokenmill.run(prompts, output="results.jsonl", model="smollm2", defaults={"max_tokens": 8})
summary, len(open("results.jsonl").readlines())"""
LOOP = """\
import asyncio
import sys

asyncio.get_running_loop().is_running(), sys.executable"""


@pytest.fixture
def notebook(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook after it was run from top to bottom."""
    assert smollm2_path.exists()
    for name in ("XDG_STATE_HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    v4: Any = nbformat.v4  # not typed
    made = v4.new_notebook(cells=[v4.new_code_cell(source) for source in (LOOP, PLAN, FACTS, LOAD, RUN)])
    client = NotebookClient(
        made, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    return client.execute()


def test_a_notebook_runs_from_top_to_bottom(notebook: Any) -> None:
    loop, plan, facts, load, run = (cell.outputs for cell in notebook.cells)
    assert loop[0].data["text/plain"] == f"(True, {sys.executable!r})"
    [table] = plan
    assert "<table" in table.data["text/html"]
    assert "gpu0" in table.data["text/plain"]
    assert facts[0].data["text/plain"] == "(True, True, True)"
    printed = "".join(output.text for output in load if output.get("name") == "stdout").splitlines()
    assert [line.isdigit() for line in printed[-2:]] == [True, True]
    assert len(printed) >= 3
    assert "loading" in str(load)  # the progress bar: a widget, or text without ipywidgets
    assert "Warning" not in str(load)
    assert "2 of 2 jobs answered" in run[-1].data["text/plain"]
    assert run[-1].data["text/plain"].split()[-1] == "2)"
