"""`tokenmill history`, and plans that it corrects."""

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli import run
from tokenmill.cli.views.history import curve
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.model.identity import identity_of
from tokenmill.model.synthetic import generate
from tokenmill.tuner.history import Source, SpeedRecord, append
from tokenmill.tuner.point import Figures, TrialSettings

DIALS = TrialSettings(threads=1, threads_batch=1, sequences=1, ubatch=512, context=1024)


class Cli:
    """The command line with its own state folder."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state, self._capsys = home / "tokenmill", capsys

    def output(self, *words: object, code: int = 0) -> str:
        """The stdout of a command; its stderr is in `messages`."""
        assert run(list(map(str, words))) == code
        said = self._capsys.readouterr()
        self.messages = said.err
        return said.out

    def json(self, *words: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output(*words, "--json"))
        return found

    def measured(self, model: Path, figures: Figures, told: Figures, *, day: int = 1, source: Source = "tune") -> None:
        machine = find("this")
        when = (datetime(2026, 11, 1, 12, tzinfo=UTC) + timedelta(days=day)).isoformat(timespec="seconds")
        append(
            self.state,
            SpeedRecord(
                when,
                machine.name,
                machine_id(machine),
                model.stem,
                identity_of(model),
                "native",
                "b1",
                source,
                DIALS,
                256,
                figures,
                told,
            ),
        )


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return Cli(tmp_path, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    generate.write("dense", generate.sizes("dense", {"layers": 2, "embed": 128, "heads": 2, "dense_ff": 256}), path)
    return path


@pytest.fixture
def busy(cli: Cli, model: Path) -> Cli:
    """Measurements of twelve days, with forecasts that improve."""
    for day in range(12):
        off = 2.0 if day < 6 else 1.1
        cli.measured(
            model,
            Figures(50.0 + day, 400.0),
            Figures((50.0 + day) * off, 400.0 * off),
            day=day,
            source="bench" if day % 2 else "tune",
        )
    return cli


def test_nothing_was_measured_yet(cli: Cli) -> None:
    assert cli.output("history") == ""
    assert "no measurements yet" in cli.messages
    assert cli.json("history") == {
        "measurements": [],
        "trends": [],
        "count": 0,
        "predictions": 0,
        "median_error_first": None,
        "median_error_last": None,
    }


def test_a_person_sees_curves_and_errors(busy: Cli) -> None:
    shown = busy.output("history", "--last", "3")
    assert "tiny on " in shown
    assert curve([50.0 + day for day in range(12)]) in shown
    assert "100% → 10%" in shown
    assert "24 speed predictions, median error 100% of the first ten, 10% of the last" in " ".join(shown.split())
    assert shown.count("1 thread, 1 slot") == 3
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_asked_for_alone(busy: Cli, model: Path) -> None:
    assert busy.json("history", "--source", "bench")["count"] == 12
    assert busy.json("history", "--model", "TIN")["count"] == 24
    assert busy.json("history", "--model", model)["count"] == 24
    busy.output("history", "--model", "another")
    assert "no matching measurements" in busy.messages
    assert len(busy.json("history", "--last", "5")["measurements"]) == 5
    busy.output("history", "--last", "-1", code=2)
    assert "--last must be at least 0" in busy.messages


def test_export_to_csv(busy: Cli, tmp_path: Path) -> None:
    target = tmp_path / "history.csv"
    assert busy.output("history", "--export", target) == ""
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    decode = [row for row in rows if row["quantity"] == "decode"]
    assert [float(row["measured"]) for row in decode] == [50.0 + day for day in range(12)]
    assert float(decode[0]["error"]) == pytest.approx(1.0)
    busy.output("history", "--export", target, code=2)
    assert "use --force to overwrite it" in busy.messages
    busy.output("history", "--export", target, "--force")


def test_a_plan_is_corrected_by_what_was_measured(cli: Cli, model: Path) -> None:
    asked = ("plan", model, "--context", 1024, "--sequences", 1, "--threads", 1, "--threads-batch", 1)
    plain = cli.json(*asked)
    assert not any("forecast" in decision["name"] for decision in plain["decisions"])
    cli.measured(model, Figures(decode_tok_s=77.0, prefill_tok_s=333.0), Figures())
    corrected = cli.json(*asked)
    (decode,) = (
        speed for speed in corrected["forecast"]["decode_tok_s"] if (speed["depth"], speed["sequences"]) == (256, 1)
    )
    assert decode["confidence"] == "calibrated"
    assert decode["tok_s"] == pytest.approx(77.0, rel=0.02)
    reasons = {decision["name"]: decision["reason"] for decision in corrected["decisions"]}
    assert reasons["decode forecast"].startswith("1 measurement")
    assert "2026-11-02" in reasons["decode forecast"]
    elsewhere = cli.json(*asked, "--machine", "epyc-9175f")
    assert {speed["confidence"] for speed in elsewhere["forecast"]["decode_tok_s"]} == {"estimated"}
