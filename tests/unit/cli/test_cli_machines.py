"""`tokenmill machines`: the list at 80 columns, one machine, JSON and errors."""

import json
from pathlib import Path

import pytest

from tokenmill.cli import run
from tokenmill.hardware import catalog, machine_file
from tokenmill.hardware.machine import Machine


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_list_has_every_machine_and_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["machines"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert {*catalog.names()} <= {line.split(" ")[0] for line in lines}
    assert max(map(len, lines)) <= 80
    assert "tokenmill machines NAME" in err


@pytest.mark.parametrize(
    "row",
    [
        "epyc-7532-8x3090 EPYC 7532 503 GiB 188 8 x RTX 3090",
        "epyc-9654-dual 2 x EPYC 9654 1536 GiB 922 -",
        "xeon-6246-optane Xeon 6246 758.4 GiB 39.4 RTX 3060",
        "xeon-6980p-one-of-two Xeon 6980P ? ? -",
    ],
)
def test_a_row_says_what_matters(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["machines"]) == 0
    assert row in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_json_is_the_whole_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["machines", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == list(catalog.names())


def test_json_of_one_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine_file.write(Machine("mine"), tmp_path / "mine.toml")
    assert run(["machines", str(tmp_path / "mine.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"


def test_a_wrong_name_is_wrong_use_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["machines", "epyc-9175"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: no machine called 'epyc-9175'" in err
    assert "hint: did you mean epyc-9175f" in err
