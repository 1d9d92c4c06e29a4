"""Whose batches a report counts, and commands that work for a model that is not downloaded."""

from pathlib import Path

import pytest

from tokenmill.api.options import EngineOptions
from tokenmill.config import Config
from tokenmill.hardware.catalog import find
from tokenmill.report import collect
from tokenmill.report.collect import Subject, read
from tokenmill.report.subject import subject


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        (Subject(find("epyc-9175f")), True),
        (Subject(find("epyc-9175f"), elsewhere=True), False),
        (Subject(find("epyc-9175f"), model="kimi-k2.5:Q4_X", elsewhere=True), False),
        (Subject(find("epyc-9175f"), model="kimi-k2.5:Q4_X"), False),
    ],
)
def test_batches_of_other_models_and_machines_are_not_counted(
    asked: Subject, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = object()
    reasons = {"batch_1": {"stop": 1}}
    monkeypatch.setattr(collect, "read_batches", lambda _address, _model: ((batches,), reasons))
    found = read(asked, tmp_path, tmp_path)
    assert (found.batches, found.finish_reasons) == (((batches,), reasons) if counted else ((), {}))


def test_commands_download_a_catalogue_model_before_they_use_it() -> None:
    found = subject("kimi-k2.5:Q4_X", EngineOptions(machine="epyc-7532-8x3090"), Config())
    commands = {command.what: command.text for command in found.commands}
    assert commands["Download it"] == "tokenmill models pull hf:AesSedai/Kimi-K2.5-GGUF:Q4_X"
    assert "--model hf:AesSedai/Kimi-K2.5-GGUF:Q4_X" in commands["Run a batch"]
    assert "serve hf:AesSedai/Kimi-K2.5-GGUF:Q4_X" in commands["Serve it"]
    assert found.elsewhere
