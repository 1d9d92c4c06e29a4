"""`tokenmill engines build`, `builds` and `remove-build`, with stand-ins for cmake and ninja."""

import json
from pathlib import Path

import pytest

from support.llama_source import stand_in, write_archive
from tokenmill.cli import run
from tokenmill.native.builds import build as building
from tokenmill.native.builds import finished
from tokenmill.native.builds.finished import BuildMachine
from tokenmill.native.builds.toolchain import this_processor
from tokenmill.native.builds.verify import OpenedLibrary

BUILD = ("engines", "build", "--cpu", "--max-sequences", "1024", "--source")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A source distribution, on a machine without a GPU."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(
        building, "verify", lambda *_, version, max_sequences: OpenedLibrary(version, max_sequences, ("CPU",))
    )
    monkeypatch.setattr(finished, "this_host", lambda: BuildMachine(this_processor(), (), gpu_wheel=False))
    stand_in(monkeypatch, tmp_path)
    return str(write_archive(tmp_path))


def test_a_build_is_made_once(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BUILD, source]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert (folder / "build.json").is_file()
    assert "2 of 2" in err
    assert run([*BUILD, source, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["folder"], found["max_sequences"], found["was_there"], found["used"]) == (
        str(folder),
        1024,
        True,
        True,
    )
    assert "--force" in err


def test_builds_are_listed_and_removed(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engines", "builds"]) == 0
    assert "tokenmill engines build" in capsys.readouterr().out
    assert run([*BUILD, source]) == 0
    name = Path(capsys.readouterr().out.strip()).name
    assert run(["engines", "builds"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(name)]
    assert row[1] == "1,024"
    assert row[-1] == "yes"
    assert run(["engines", "builds", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["used"], found["unsuitable"]) == (name, True, None)
    assert run(["engines", "remove-build", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == name
    assert run(["engines", "remove-build", name]) == 2


@pytest.mark.parametrize(
    "options", [("--cuda", "--cpu"), ("--max-sequences", "255"), ("--cpu", "--cuda-architecture", "90"), ("-j", "0")]
)
def test_options_that_cannot_be(options: tuple[str, ...], source: str) -> None:
    assert run(["engines", "build", *options, "--source", source]) == 2
